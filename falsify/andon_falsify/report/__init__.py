"""What a campaign found, for those who were not there: JSON, JUnit XML, one HTML page."""

from __future__ import annotations
