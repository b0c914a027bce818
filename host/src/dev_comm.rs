//! Device communicators: what a kernel needs in order to communicate.

use std::ffi::c_int;

use devcomm_types::{DevComm, IntoArg};

use crate::sys::nccl::abi::{API_MAGIC, Requirements};
use crate::{Communicator, Error, Result};

/// What the kernels that will use a device communicator need of it. Every rank asks for the same.
///
/// NCCL: `ncclDevCommRequirements_t`, always of version 2.32.3, with NCCL's defaults for what is not set.
///
/// ```
/// use devcomm_host::DevCommRequirements;
/// let requirements = DevCommRequirements::new().lsa_barriers(64);
/// assert_eq!(requirements.lsa_barrier_count(), 64);
/// ```
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ncclDevCommRequirements_t")]
#[doc(alias = "ncclDevCommRequirements")]
pub struct DevCommRequirements {
    lsa_barriers: u32,
    lsa_multimem: bool,
}

impl DevCommRequirements {
    /// Nothing beyond the ranks' addresses.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "what is required is stated, not defaulted")]
    pub const fn new() -> Self {
        Self { lsa_barriers: 0, lsa_multimem: false }
    }

    /// That many barriers between the ranks that reach each other by load and store: at least one a block of the largest
    /// grid. NCCL: `lsaBarrierCount`.
    #[must_use]
    #[doc(alias = "lsaBarrierCount")]
    pub const fn lsa_barriers(mut self, count: u32) -> Self {
        self.lsa_barriers = count;
        self
    }

    /// A multicast mapping over these ranks. Refused where [`Properties::multimem`](crate::Properties::multimem) is false
    /// or NCCL_NVLS_ENABLE is 0. NCCL: `lsaMultimem`.
    #[must_use]
    #[doc(alias = "lsaMultimem")]
    pub const fn lsa_multimem(mut self, wanted: bool) -> Self {
        self.lsa_multimem = wanted;
        self
    }

    /// The number of LSA barriers asked for.
    #[must_use]
    pub const fn lsa_barrier_count(&self) -> u32 {
        self.lsa_barriers
    }

    /// Whether a multicast mapping is asked for.
    #[must_use]
    pub const fn wants_multimem(&self) -> bool {
        self.lsa_multimem
    }

    pub(crate) fn to_raw(self) -> Result<Requirements> {
        let mut raw = Requirements::new();
        raw.lsa_barrier_count = c_int::try_from(self.lsa_barriers).map_err(|_| {
            Error::invalid(format!("{} LSA barriers are too many", self.lsa_barriers))
        })?;
        raw.lsa_multimem = self.lsa_multimem;
        Ok(raw)
    }
}

/// A device communicator and the resources behind it.
///
/// Made by [`Communicator::create_dev_comm`]. A launch takes `&DevCommResource` where the kernel has a `DevComm`. Dropped, it
/// waits for this rank's streams and frees the resources; after a lost rank they are left to the end of the process.
///
/// NCCL: `ncclDevComm`, `ncclDevCommCreate`, `ncclDevCommDestroy`.
#[doc(alias = "ncclDevComm")]
#[doc(alias = "ncclDevCommCreate")]
pub struct DevCommResource {
    dev_comm: DevComm,
    communicator: Communicator,
}

impl DevCommResource {
    pub(crate) fn new(communicator: &Communicator, requirements: &Requirements) -> Result<Self> {
        let nccl = communicator.library().nccl();
        let dev_comm = nccl.create_dev_comm(communicator.comm()?, requirements)?;
        Ok(Self { dev_comm, communicator: communicator.clone() })
    }

    /// The struct that kernels get, by value.
    #[must_use]
    pub fn dev_comm(&self) -> &DevComm {
        &self.dev_comm
    }

    /// The communicator it belongs to.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }
}

impl IntoArg<DevComm> for &DevCommResource {
    fn into_arg(self) -> DevComm {
        self.dev_comm
    }

    fn dev_comm(&self) -> Option<&DevComm> {
        Some(&self.dev_comm)
    }
}

impl Drop for DevCommResource {
    fn drop(&mut self) {
        let context = self.communicator.context();
        let (Ok(comm), false) = (self.communicator.comm(), context.health().is_lost()) else {
            return;
        };
        if !context.is_settled("a device communicator") {
            return;
        }
        let _ = context.cuda().bind();
        // SAFETY: made by the same communicator and dropped once; this rank's streams are idle.
        let ended =
            unsafe { self.communicator.library().nccl().destroy_dev_comm(comm, &self.dev_comm) };
        if let Err(error) = ended {
            tracing::warn!("{error}");
        }
    }
}

impl std::fmt::Debug for DevCommResource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("DevCommResource").field(&self.dev_comm).finish()
    }
}

/// Whether NCCL filled this struct in.
pub(crate) fn is_filled(dev_comm: &DevComm) -> bool {
    dev_comm.magic == API_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_start_from_nccls_initializer() {
        let raw = DevCommRequirements::new().to_raw().unwrap();
        assert_eq!((raw.size, raw.magic, raw.version), (120, 0xcafe_beef, 23203));
        assert_eq!((raw.gin_context_count, raw.gin_traffic_class), (4, i32::MIN));
        assert!(raw.gin_strong_signals_required && raw.gin_va_signals_required);
        assert_eq!(raw.gin_custom_stride, 1);
        assert!(raw.resource_requirements_list.is_null() && raw.team_requirements_list.is_null());
        let counts = [
            raw.barrier_count,
            raw.lsa_barrier_count,
            raw.rail_gin_barrier_count,
            raw.world_gin_barrier_count,
            raw.gin_signal_count,
            raw.gin_counter_count,
            raw.gin_connection_type,
            raw.gin_type,
            raw.cft_caps,
            raw.cft_barrier_count,
        ];
        assert_eq!(counts, [0; 10]);
        assert!(!raw.lsa_multimem && !raw.use_runtime_version && !raw.gin_force_enable);
    }

    #[test]
    fn what_is_asked_for_reaches_nccl() {
        let raw = DevCommRequirements::new().lsa_barriers(7).lsa_multimem(true).to_raw().unwrap();
        assert_eq!((raw.lsa_barrier_count, raw.lsa_multimem), (7, true));
        assert!(DevCommRequirements::new().lsa_barriers(u32::MAX).to_raw().is_err());
    }
}
