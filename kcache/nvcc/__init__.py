"""nvcc under `kcache run`: requests, what a compile depended on, and the files that it wrote."""
