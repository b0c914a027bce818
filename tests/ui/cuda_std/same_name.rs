//! Two kernels have one name, which would be one entry point.

mod a {
    use cuda_std::prelude::*;

    #[kernel]
    pub fn fill(_count: usize) {}
}

mod b {
    use cuda_std::prelude::*;

    #[kernel]
    pub fn fill(_count: usize) {}
}

fn main() {}
