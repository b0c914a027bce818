//! The collective of a fused operation, by devcomm or by NCCL.

use devcomm::{Collectives, Communicator, DeviceSlice, ReduceOp, Stream};
use half::bf16;

/// The collective that a product is fused with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// An all-reduce of the ranks' products, in place.
    AllReduce,
    /// A reduce-scatter of the rows of the ranks' products.
    ReduceScatter,
    /// An all-gather of the rows of A, before the product. All ranks have the same A and B.
    AllGather,
}

/// A collective, the stream that it is enqueued on, and who does it.
pub(super) struct Collect<'a> {
    pub(super) collective: Collective,
    pub(super) stream: &'a Stream,
    pub(super) by: By<'a>,
}

/// The performer of a collective: devcomm's kernels, or NCCL.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    Kernels(&'a Collectives),
    Nccl(&'a Communicator),
}

impl Collect<'_> {
    pub(super) fn enqueue(
        &self,
        from: &DeviceSlice<bf16>,
        to: &DeviceSlice<bf16>,
    ) -> devcomm::Result<()> {
        let (op, stream) = (ReduceOp::Sum, self.stream);
        match (self.collective, self.by) {
            (Collective::AllReduce, By::Kernels(by)) => by.all_reduce(from, to, op, stream),
            (Collective::AllReduce, By::Nccl(by)) => by.all_reduce(from, to, op, stream),
            (Collective::ReduceScatter, By::Kernels(by)) => by.reduce_scatter(from, to, op, stream),
            (Collective::ReduceScatter, By::Nccl(by)) => by.reduce_scatter(from, to, op, stream),
            (Collective::AllGather, By::Kernels(by)) => by.all_gather(from, to, stream),
            (Collective::AllGather, By::Nccl(by)) => by.all_gather(from, to, stream),
        }
    }
}
