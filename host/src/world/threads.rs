//! Which types may move to other threads, and which several threads may use at a time: checked when
//! this is compiled.

use super::{LocalJob, Rank, World};
use crate::communicator::{
    AbortHandle, BorrowedRegistration, Communicator, CustomReduceOp, DevCommResource, Library,
    MultiGpu, RegisteredBuffer, SymmetricBuffer, Window,
};
use crate::device::{
    Context, DeviceSlice, Dynamic, Event, Graph, KernelAbortHandle, Kernels, KernelsOn,
    PinnedBuffer, Stream,
};
use crate::sys::dlpack::DlpackTensor;

const fn move_to_other_threads<T: Send>() {}
const fn are_used_by_several<T: Send + Sync>() {}

const _: () = {
    are_used_by_several::<(World, Rank, LocalJob, Context, Library)>();
    are_used_by_several::<(Communicator, MultiGpu, AbortHandle, KernelAbortHandle)>();
    are_used_by_several::<(Stream, Event, Kernels, KernelsOn<'_>)>();
    are_used_by_several::<(Window<f32>, DevCommResource, CustomReduceOp<f32>)>();
    are_used_by_several::<(SymmetricBuffer<f32>, RegisteredBuffer, BorrowedRegistration)>();
    are_used_by_several::<(DeviceSlice<f32>, DeviceSlice<Dynamic>, PinnedBuffer<f32>)>();
    are_used_by_several::<DlpackTensor>();
    // CUDA allows one thread at a time to use a graph.
    move_to_other_threads::<Graph>();
};

/// Fails to compile if `$type` has the trait: then two implementations of `Excluded` fit.
macro_rules! lacks {
    ($type:ty, $trait:path) => {
        const _: fn() = || {
            trait Excluded<Case> {
                fn check() {}
            }
            struct Has;
            impl<T: ?Sized> Excluded<()> for T {}
            impl<T: ?Sized + $trait> Excluded<Has> for T {}
            <$type as Excluded<_>>::check();
        };
    };
}

lacks!(Graph, Sync);
// An NCCL group belongs to the thread that has begun it.
lacks!(crate::communicator::Group, Send);
lacks!(crate::communicator::Group, Sync);
