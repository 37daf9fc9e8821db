"""Reports of campaigns: the data model, and its forms as text, JSON, JUnit XML and one HTML page."""
