//! Tests that invalid arguments are errors before NCCL is called, and leave the communicator
//! usable.

use devcomm::{Buffer, Context, Error, ReduceOp, Stream, SymmetricBuffer, group};

use devcomm_testing::machines::on_gpus;
use devcomm_testing::works::require_works;

/// Checks for an [`Error::InvalidInput`] with all `words` in its message.
fn refused(result: Result<(), Error>, words: &[&str]) {
    match result {
        Err(Error::InvalidInput { what }) => {
            for word in words {
                assert!(what.contains(word), "{what:?} does not say {word:?}");
            }
        }
        other => panic!("expected a refusal that says {words:?}, got {other:?}"),
    }
}

#[test]
fn lengths_that_do_not_fit() {
    on_gpus("lengths_that_do_not_fit", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (one, two) = (comm.mem_alloc::<f32>(100)?, comm.mem_alloc::<f32>(200)?);
        let odd = comm.mem_alloc::<f32>(101)?;
        let op = ReduceOp::Sum;
        let (one_at_root, two_at_root) = (Some(one.device_slice()), Some(two.device_slice()));
        refused(comm.all_reduce(&one, &two, op, &stream), &["all-reduce", "100", "200"]);
        refused(comm.all_gather(&one, &one, &stream), &["all-gather", "100"]);
        refused(comm.reduce_scatter(&one, &one, op, &stream), &["reduce-scatter", "100"]);
        refused(comm.all_to_all(&one, &two, &stream), &["all-to-all", "100", "200"]);
        refused(comm.all_to_all(&odd, &odd, &stream), &["all-to-all", "101"]);
        if rank.is_root() {
            // Only the root has both buffers, so only there the lengths are compared.
            refused(comm.reduce(&one, two_at_root, op, 0, &stream), &["reduction", "100", "200"]);
            let shorter = one_at_root.clone();
            refused(comm.broadcast(shorter, &two, 0, &stream), &["broadcast", "100", "200"]);
            refused(comm.gather(&one, one_at_root.clone(), 0, &stream), &["gather", "100"]);
            refused(comm.scatter(one_at_root, &one, 0, &stream), &["scatter", "100"]);
        }
        require_works(comm, &stream)
    });
}

#[test]
fn roots_and_peers_that_do_not_exist() {
    on_gpus("roots_and_peers_that_do_not_exist", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let a = comm.mem_alloc::<f32>(8)?;
        let op = ReduceOp::Sum;
        for root in [2, usize::MAX] {
            let whole = || Some(a.device_slice());
            refused(comm.reduce(&a, whole(), op, root, &stream), &["2 ranks"]);
            refused(comm.broadcast(whole(), &a, root, &stream), &["2 ranks"]);
            refused(comm.gather(&a, whole(), root, &stream), &["2 ranks"]);
            refused(comm.scatter(whole(), &a, root, &stream), &["2 ranks"]);
            refused(group(|_| comm.send(&a, root, &stream)), &["2 ranks"]);
            refused(group(|_| comm.recv(&a, root, &stream)), &["2 ranks"]);
        }
        if rank.is_root() {
            refused(comm.reduce(&a, None, op, 0, &stream), &["root", "receive"]);
            refused(comm.broadcast(None, &a, 0, &stream), &["root", "send"]);
            refused(comm.gather(&a, None, 0, &stream), &["root", "receive"]);
            refused(comm.scatter(None, &a, 0, &stream), &["root", "send"]);
        }
        require_works(comm, &stream)
    });
}

#[test]
fn memory_and_streams_of_another_context() {
    on_gpus("memory_and_streams_of_another_context", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let own = comm.mem_alloc::<f32>(8)?;
        // The same GPU, but another `Context`, which tracks other streams.
        let other = Context::new(rank.device())?;
        let foreign: SymmetricBuffer<f32> = SymmetricBuffer::new(rank.library(), &other, 8)?;
        let foreign_stream: Stream = other.stream()?;
        let op = ReduceOp::Sum;
        refused(comm.all_reduce(&foreign, &own, op, &stream), &["another context"]);
        refused(comm.all_reduce(&own, &foreign, op, &stream), &["another context"]);
        refused(comm.all_reduce(&own, &own, op, &foreign_stream), &["another context"]);
        refused(group(|_| comm.send(&foreign, 0, &stream)), &["another context"]);
        require_works(comm, &stream)
    });
}

#[test]
fn parts_beyond_the_end() {
    on_gpus("parts_beyond_the_end", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let a = comm.mem_alloc::<f32>(8)?;
        refused(a.slice(..9).map(drop), &["8"]);
        refused(a.slice(9..).map(drop), &["8"]);
        refused(a.slice(..=usize::MAX).map(drop), &["8"]);
        refused(a.slice(2..)?.slice(..7).map(drop), &["6"]);
        refused(a.copy_from_host(&[0.0; 9]), &["9", "8"]);
        refused(a.slice(6..)?.copy_to_host(&mut [0.0; 3]), &["3", "2"]);
        refused(comm.mem_alloc::<f32>(0).map(drop), &["0"]);
        require_works(comm, &stream)
    });
}
