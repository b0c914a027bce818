//! The division of a block's registers among its warpgroups.

use crate::wgmma;

/// The division of a block's registers between the warps that compute and the other warps.
pub trait RegisterSplit {
    /// Registers of a computing thread and of another one; with `None` each keeps the launch's.
    const REGISTERS: Option<[u32; 2]>;

    /// Raises the registers of a computing warpgroup.
    ///
    /// # Safety
    ///
    /// The contract is that of [`wgmma::raise_registers`].
    unsafe fn raise();

    /// Lowers the registers of a warpgroup that does not compute.
    ///
    /// # Safety
    ///
    /// The contract is that of [`wgmma::lower_registers`].
    unsafe fn lower();
}

/// The registers that the launch gave each thread.
impl RegisterSplit for () {
    const REGISTERS: Option<[u32; 2]> = None;

    unsafe fn raise() {}

    unsafe fn lower() {}
}

/// `COMPUTING` registers for a thread that computes, and `OTHER` for another one; both are
/// multiples of 8 from 24 to 256. Added up over the warpgroups they are at most what a launch gives
/// the block: 504 for its 3 warpgroups, or 512 for 2 or 4.
#[derive(Clone, Copy, Debug)]
pub struct Registers<const COMPUTING: u32, const OTHER: u32>;

impl<const COMPUTING: u32, const OTHER: u32> RegisterSplit for Registers<COMPUTING, OTHER> {
    const REGISTERS: Option<[u32; 2]> = Some([COMPUTING, OTHER]);

    unsafe fn raise() {
        // SAFETY: the warpgroup calls it together, and the block has the registers: `raise`'s
        // contract.
        unsafe { wgmma::raise_registers::<COMPUTING>() }
    }

    unsafe fn lower() {
        // SAFETY: the warpgroup calls it together, and needs no more: `lower`'s contract.
        unsafe { wgmma::lower_registers::<OTHER>() }
    }
}
