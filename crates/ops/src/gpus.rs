//! The names of the GPUs that plans were measured on. Other cards of the same chip have other
//! names: fewer multiprocessors, other clocks or another link between them.

/// The H100 with SXM5 and HBM3.
pub(crate) const H100: &str = "NVIDIA H100 80GB HBM3";
/// The H200 with SXM5.
pub(crate) const H200: &str = "NVIDIA H200";
