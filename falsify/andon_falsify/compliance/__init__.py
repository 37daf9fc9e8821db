"""The compliance tests: the claims about a data-parallel trainer, judged on each of its backends.

`pytest --pyargs andon_falsify` runs them, with `-p andon_falsify.compliance.plugin --backend NAME` on one backend.
"""
