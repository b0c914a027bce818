//! Hints to the compiler.

/// The same number, which the compiler knows nothing of: what is computed from it is computed
/// behind this place. It costs no instruction.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn opaque(value: u32) -> u32 {
    crate::arch::opaque(value)
}

/// [`opaque`] of an index: so that loops whose addresses begin there do not depend on how it was
/// worked out.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn opaque_usize(value: usize) -> usize {
    crate::arch::opaque_usize(value)
}
