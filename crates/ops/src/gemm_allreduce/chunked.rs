//! A product in parts of its rows, whose sums travel on a stream of their own while the next part
//! is multiplied.

use devcomm_host::{Buffer, Communicator, DeviceSlice, Event, ReduceOp, Result, Stream, Window};
use devcomm_kernels::gemm::gemm_wgmma::{CLUSTER, TILE_M};
use half::bf16;

use crate::{Collectives, Gemm};

/// Rows of a part are a multiple of these: those of a cluster's tile.
const ROWS: usize = (CLUSTER * TILE_M) as usize;
/// The most parts.
pub(super) const MOST_PARTS: u32 = 64;
/// Multiprocessors that large products leave to the sums: so many saturate NVLink by stores.
const LEFT: u32 = 16;

/// The product and its sums, each on a stream.
pub(super) struct Chunked {
    gemm: Gemm,
    collectives: Collectives,
    sums: Stream,
    event: Event,
}

/// The rows of each part but the last, if there are several.
fn rows(m: usize, parts: u32) -> Option<usize> {
    let rows = m.div_ceil(parts as usize).next_multiple_of(ROWS);
    (rows < m).then_some(rows)
}

/// Whether a product of so many rows has several parts.
pub(super) fn supports(m: usize, parts: u32) -> bool {
    rows(m, parts).is_some()
}

impl Chunked {
    /// *Collective*.
    pub(super) fn new(comm: &Communicator, stream: &Stream, constant_b: bool) -> Result<Self> {
        let own = || {
            let multiprocessors = comm.context().limits().multiprocessors;
            let gemm = Gemm::new(stream)?.leaving(LEFT.min(multiprocessors / 2));
            // SAFETY: `GemmAllReduce::with_constant_b`'s contract.
            let gemm = if constant_b { unsafe { gemm.with_constant_b() } } else { gemm };
            let (sums, event) = (comm.context().stream()?, comm.context().event_without_timing()?);
            Ok(((gemm, sums, event), ()))
        };
        let call = comm.collective("GemmAllReduce: the plan chunked");
        let ((gemm, sums, event), _) = call.agree(own())?;
        let collectives = Collectives::new(comm)?;
        Ok(Self { gemm, collectives, sums, event })
    }

    /// Lets its products read B early.
    ///
    /// # Safety
    ///
    /// As [`Gemm::with_constant_b`].
    pub(super) unsafe fn with_constant_b(self) -> Self {
        // SAFETY: the caller's contract.
        Self { gemm: unsafe { self.gemm.with_constant_b() }, ..self }
    }

    /// Enqueues a product of so many parts: `stream` has all of it when it goes on.
    pub(super) fn launch(
        &self,
        stream: &Stream,
        [a, b]: [&DeviceSlice<bf16>; 2],
        c: &Window<bf16>,
        [m, n, k]: [usize; 3],
        parts: u32,
    ) -> Result<()> {
        let (rows, mut first) = (rows(m, parts).unwrap_or(m), 0);
        while first < m {
            let end = m.min(first + rows);
            let (a, c) = (a.slice(first * k..end * k)?, c.slice(first * n..end * n)?);
            self.gemm.launch(&a, b, &c, [end - first, n, k])?;
            stream.record(&self.event)?;
            self.sums.wait_event(&self.event)?;
            self.collectives.all_reduce(&c, &c, ReduceOp::Sum, &self.sums)?;
            first = end;
        }
        self.sums.record(&self.event)?;
        stream.wait_event(&self.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_tiles_and_there_are_several() {
        assert_eq!(rows(1024, 2), Some(512));
        assert_eq!(rows(1024, 3), Some(512));
        assert_eq!(rows(257, 2), Some(256));
        assert_eq!(rows(256, 2), None);
        assert_eq!(rows(1, 4), None);
        assert!(supports(600, 2) && !supports(200, 2));
    }
}
