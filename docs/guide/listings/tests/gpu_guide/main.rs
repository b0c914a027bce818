//! The listings that run on simulated GPUs and on real ones, a file for each chapter of the guide,
//! and one for the README.

mod all_reduce;
mod norm;
mod products;
mod readme;
mod softmax;
mod teams;
