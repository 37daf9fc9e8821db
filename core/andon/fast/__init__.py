"""Optional speed, independent of any model: rewrites of the compiler's graphs, and attention kernels in Triton."""
