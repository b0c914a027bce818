//! By NCCL's call on the host.

use anyhow::Result;
use devcomm::{Buffer, DeviceSlice, ReduceOp, Window};

use crate::number::{Number, checksum, count_wrong, inputs};
use crate::versus::gpus::Gpus;
use crate::versus::machine::Way;
use crate::versus::variant::Variant;

/// NCCL's all-reduce.
pub struct ByHost<'a, T> {
    gpus: &'a Gpus<'a>,
    variant: Variant,
    send: DeviceSlice<T>,
    recv: DeviceSlice<T>,
}

impl<'a, T: Number> ByHost<'a, T> {
    /// On memory of its own as NCCL allocates it, with this rank's input.
    pub fn unregistered(gpus: &'a Gpus<'a>, count: usize) -> Result<Self> {
        let (send, recv) = (gpus.comm.mem_alloc(count)?, gpus.comm.mem_alloc(count)?);
        Self::new(gpus, Variant::Nccl, send.device_slice(), recv.device_slice())
    }

    /// On windows, of which the first gets this rank's input.
    pub fn on_windows(gpus: &'a Gpus<'a>, send: &Window<T>, recv: &Window<T>) -> Result<Self> {
        Self::new(gpus, Variant::NcclSym, send.device_slice(), recv.device_slice())
    }

    fn new(
        gpus: &'a Gpus<'a>,
        variant: Variant,
        send: DeviceSlice<T>,
        recv: DeviceSlice<T>,
    ) -> Result<Self> {
        send.copy_from_host(&inputs(gpus.options.run.seed, gpus.rank.rank(), send.len()))?;
        Ok(Self { gpus, variant, send, recv })
    }
}

impl<T: Number> Way for ByHost<'_, T> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn enqueue(&self) -> Result<()> {
        let Self { gpus, send, recv, .. } = self;
        Ok(gpus.comm.all_reduce(send, recv, ReduceOp::Sum, &gpus.stream)?)
    }

    fn spoil(&self) -> Result<()> {
        // NaNs.
        Ok(self.recv.fill(0xff)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        // A ring rounds each partial sum.
        let roundings = (self.gpus.rank.n_ranks() - 1).max(1);
        Ok(wrong_in(self.gpus, &self.recv, roundings)?.0)
    }
}

/// Wrong elements, and a checksum.
pub fn wrong_in<T: Number>(
    gpus: &Gpus<'_>,
    recv: &DeviceSlice<T>,
    roundings: usize,
) -> Result<(usize, u64)> {
    let mut got = vec![T::nearest(0.0); recv.len()];
    recv.copy_to_host(&mut got)?;
    let wrong = count_wrong(gpus.options.run.seed, gpus.rank.n_ranks(), roundings, &got);
    Ok((wrong, checksum(&got)))
}
