//! C of the fused product.

use std::ops::Deref;

use devcomm_host::{Communicator, Result, Window};
use half::bf16;

use super::check::refuse;

/// C: a window that has the same length in every rank, as the kernel needs that stores to all of
/// them.
pub struct GemmOutput(Window<bf16>);

impl GemmOutput {
    /// Allocates `len` elements, zeroed, and registers them with every rank. *Collective*, with the
    /// same length on every rank.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`](devcomm_host::Error::InvalidInput) on every rank where the lengths
    /// differ, and for a communicator that was made without a world; as [`Communicator::window`].
    pub fn new(comm: &Communicator, len: usize) -> Result<Self> {
        let all = comm.host_all_gather(&[len as u64])?;
        if let Some(other) = all.iter().position(|other| *other != [len as u64]) {
            return refuse(format!("C has {len} elements here, but rank {other} asks for others"));
        }
        comm.window(len).map(Self)
    }
}

impl Deref for GemmOutput {
    type Target = Window<bf16>;

    fn deref(&self) -> &Window<bf16> {
        &self.0
    }
}

impl std::fmt::Debug for GemmOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GemmOutput({} elements)", self.len())
    }
}
