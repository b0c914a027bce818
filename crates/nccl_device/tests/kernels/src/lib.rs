//! One kernel for each function of `reduce_copy`, which tests compile to PTX and run in the simulator.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

pub mod local;
pub mod lsa;
pub mod multimem;
pub mod nccl;
