"""Speed that is optional: rewrites of the compiler's graphs, and attention by kernels of our own. Knows no model."""
