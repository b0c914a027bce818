//! The competitors: variants, their roles in each benchmark, and the programs and libraries of
//! others.

pub mod contender;
pub mod contest;
pub mod cublas;
pub mod cublaslt;
pub mod foreign;
pub mod peers;
mod selection;

pub use contender::{Contender, Outcome, Variant};
pub use contest::{Contest, Role};
pub use foreign::PeerResult;
pub use peers::{PeerOptions, PeerWork};
pub use selection::Selection;
