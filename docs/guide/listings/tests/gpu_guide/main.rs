//! The listings that run on simulated GPUs and on real ones, a file for each chapter of the guide.

mod all_reduce;
mod hopper;
mod norm;
mod numbers;
mod products;
mod softmax;
mod teams;
mod testing;
