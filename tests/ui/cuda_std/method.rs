use cuda_std::prelude::*;

struct S;

impl S {
    #[kernel]
    fn k(self) {}
}

fn main() {}
