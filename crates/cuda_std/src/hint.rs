//! Optimization barriers for values.

/// Returns `value`, which the optimizer treats as unknown: it computes nothing from the result
/// before this call. It emits no instruction.
pub fn opaque(value: u32) -> u32 {
    crate::arch::opaque(value)
}

/// Does the same as [`opaque`], for an index: addresses computed from the result do not depend on
/// how `value` was computed.
pub fn opaque_usize(value: usize) -> usize {
    crate::arch::opaque_usize(value)
}
