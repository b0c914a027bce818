//! The guide's listings that run on simulated GPUs and on real ones, a file for each chapter.

mod all_reduce;
mod norm;
mod products;
mod teams;
