//! The competitors: variants, their roles in each benchmark, and the programs and libraries of
//! others.

pub mod contender;
pub mod contest;
pub mod cublas;
pub mod cublaslt;
pub mod foreign;
pub mod peers;
pub mod selection;
