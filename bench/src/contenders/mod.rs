//! The competitors: variants, their roles in each benchmark, and the programs and libraries of
//! others.

pub mod contender;
mod contest;
pub mod cublas;
pub mod cublaslt;
pub mod foreign;
pub mod peers;
mod selection;

pub use contender::{Contender, Outcome, Variant};
pub use contest::Contest;
pub use foreign::Foreign;
pub use peers::{PeerOptions, Work};
pub use selection::{Selection, VariantInfo};
