//! Tests of communicators created from others by split, shrink and grow.

use std::time::Duration;

use devcomm::{CommConfig, Communicator, Error, Rank, ReduceOp, ShrinkMode, UniqueId};

use devcomm_testing::machines::{Gpus, give_time, on_gpus};
use devcomm_testing::works::{require_kernels_work, require_works};

fn splits(rank: &Rank) -> Result<(), Error> {
    let (comm, stream, config) = (rank.communicator()?, rank.stream()?, CommConfig::new());
    let (me, n) = (rank.rank(), rank.n_ranks());

    // Even and odd ranks form a child each, in reversed order.
    let parity = me % 2;
    let child = comm.split(Some(parity as i32), -(me as i32), &config)?.unwrap();
    let members: Vec<usize> = (0..n).rev().filter(|rank| rank % 2 == parity).collect();
    assert_eq!(child.n_ranks(), members.len());
    assert_eq!(members[child.rank()], me);
    let (child_rank, child_n, device) = child.identity()?;
    assert_eq!((child_rank as usize, child_n as usize), (child.rank(), child.n_ranks()));
    assert_eq!(device as usize, rank.device());
    require_works(&child, &stream)?;
    require_kernels_work(rank, &child, &stream)?;
    child.barrier()?;

    // Split without rank 0, while the first child exists, and with a configuration.
    let shared = CommConfig::new().split_share(true).comm_name("rest");
    let rest = comm.split((me > 0).then_some(0), 0, &shared)?;
    assert_eq!(rest.is_some(), me > 0);
    if let Some(rest) = rest {
        assert_eq!((rest.rank(), rest.n_ranks()), (me - 1, n - 1));
        require_works(&rest, &stream)?;
        rest.barrier()?;
        rest.destroy()?;
    }

    let negative = comm.split(Some(-1), 0, &config);
    assert!(matches!(negative, Err(Error::InvalidInput { .. })), "{negative:?}");
    child.destroy()?;
    assert!(!child.is_valid());
    require_works(comm, &stream)
}

#[test]
fn splits_on_two_gpus() {
    on_gpus("splits_on_two_gpus", 2, splits);
}

#[test]
fn splits_on_four_gpus() {
    on_gpus("splits_on_four_gpus", 4, splits);
}

/// Removes the last rank by a shrink, and adds it again by a grow.
fn shrinks_and_grows(rank: &Rank) -> Result<(), Error> {
    let (comm, stream, config) = (rank.communicator()?, rank.stream()?, CommConfig::new());
    let (me, n) = (rank.rank(), rank.n_ranks());
    let last = n - 1;
    for exclude in [&[][..], &[me], &[n], &[(me + 1) % n, (me + 1) % n]] {
        let refused = comm.shrink(exclude, ShrinkMode::Idle, &config);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{exclude:?}: {refused:?}");
    }

    let small = (me < last).then(|| comm.shrink(&[last], ShrinkMode::Idle, &config));
    let small = small.transpose()?;
    if let Some(small) = &small {
        assert_eq!((small.rank(), small.n_ranks()), (me, last));
        require_works(small, &stream)?;
        require_kernels_work(rank, small, &stream)?;
        small.barrier()?;
        let refused = small.grow(last, None, &config);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
    }

    let id = small.as_ref().filter(|_| me == 0).map(Communicator::unique_id).transpose()?;
    let bytes = rank.broadcast(0, id.as_ref().map_or(&[][..], |id| &id.as_bytes()[..]))?;
    let grown = match &small {
        Some(small) => small.grow(n, id.as_ref(), &config)?,
        None => {
            let id = UniqueId::from_bytes(&bytes).unwrap();
            Communicator::join_grown(rank.library(), rank.context(), &id, last, n, &config)?
        }
    };
    assert_eq!((grown.rank(), grown.n_ranks()), (me, n));
    require_works(&grown, &stream)?;
    require_kernels_work(rank, &grown, &stream)?;
    grown.destroy()?;
    small.as_ref().map_or(Ok(()), Communicator::destroy)?;
    require_works(comm, &stream)
}

#[test]
fn shrinks_and_grows_on_two_gpus() {
    on_gpus("shrinks_and_grows_on_two_gpus", 2, shrinks_and_grows);
}

#[test]
fn shrinks_and_grows_on_four_gpus() {
    on_gpus("shrinks_and_grows_on_four_gpus", 4, shrinks_and_grows);
}

/// One rank does not join an operation; the others shrink the communicator and continue.
fn shrinks_out_of_an_operation_that_hangs(rank: &Rank) -> Result<(), Error> {
    let comm = rank.new_communicator(&CommConfig::new())?;
    let stream = rank.stream()?;
    require_works(&comm, &stream)?;
    let last = rank.n_ranks() - 1;
    if rank.rank() < last {
        let memory = comm.mem_alloc::<f32>(1 << 16)?;
        comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        give_time(rank, Duration::from_millis(100));
        assert!(!stream.is_idle()?);
        let small = comm.shrink(&[last], ShrinkMode::Abort, &CommConfig::new())?;
        let fresh = rank.stream()?;
        require_works(&small, &fresh)?;
        small.destroy()?;
    }
    rank.barrier()?;
    comm.abort()
}

#[test]
fn shrinks_out_of_an_operation_that_hangs_on_two_gpus() {
    let name = "shrinks_out_of_an_operation_that_hangs_on_two_gpus";
    Gpus::new(2).unchecked().run(name, shrinks_out_of_an_operation_that_hangs);
}

#[test]
fn shrinks_out_of_an_operation_that_hangs_on_four_gpus() {
    let name = "shrinks_out_of_an_operation_that_hangs_on_four_gpus";
    Gpus::new(4).unchecked().run(name, shrinks_out_of_an_operation_that_hangs);
}
