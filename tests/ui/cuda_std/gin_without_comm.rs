use cuda_std::prelude::*;

extern crate self as nccl_device;

mod gin {
    pub enum Proxy {}
    pub enum Gdaki {}
    pub enum Gpi {}
    pub enum EfaGda {}
}

#[kernel(B = gin)]
fn k<B>(_x: u32) {}

fn main() {}
