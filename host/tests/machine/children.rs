//! Tests of communicators created from others by split, shrink and grow.

use std::time::Duration;

use devcomm_host::{
    CommConfig, Communicator, Context, DevCommError, DevCommRequirements, Effect, Error, Rank,
    ReduceOp, Result, ShrinkMode, StateError, UniqueId, World, WorldError,
};

use crate::support::{
    assert_ended, assert_invalid, contents, count, filled, inject, log_in, logged, makes_no_calls,
    now, pause, ranks, ranks_on, simulation, world,
};

/// Returns the sum of the world ranks of a communicator's ranks.
fn sum(comm: &Communicator, rank: &Rank) -> Result<f32> {
    let (b, stream) = (filled(comm, &[rank.rank() as f32])?, rank.stream()?);
    comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
    Ok(contents(&b)[0])
}

#[test]
fn a_split_orders_ranks_by_key_and_excludes_ranks_without_a_color() {
    let ran = ranks_on(simulation().multimem(false), 4, |rank| {
        let (me, comm) = (rank.rank(), rank.communicator()?);
        assert_invalid(comm.split(Some(-1), 0, &CommConfig::new()));
        // The keys reverse the order.
        let color = (me != 2).then_some(5);
        let child = comm.split(color, -(me as i32), &CommConfig::new())?;
        let Some(child) = child else { return Ok(None) };
        assert_eq!(sum(&child, rank)?, 4.0);
        assert_eq!(child.identity()?, (child.rank() as i32, 3, me as i32));
        // Errors name ranks of the child.
        let multimem = DevCommRequirements::new().lsa_multimem(true);
        let asked = if me == 3 { multimem } else { DevCommRequirements::new() };
        match child.create_dev_comm(asked) {
            Err(Error::DevComm(DevCommError::Refused { rank: 0, .. })) if me == 3 => {}
            Err(Error::World(WorldError::CallFailed { rank: 0, others: 0, .. })) if me != 3 => {}
            other => panic!("{other:?}"),
        }
        Ok(Some((child.rank(), child.n_ranks())))
    });
    assert_eq!(ran.results, [Some((2, 3)), Some((1, 3)), None, Some((0, 3))]);
}

#[test]
fn children_work_concurrently_and_wait_for_their_own_members_only() {
    ranks(4, |rank| {
        let (me, comm) = (rank.rank(), rank.communicator()?);
        let child = comm.split(Some(me as i32 % 2), 0, &CommConfig::new())?.unwrap();
        assert_eq!((child.rank(), child.n_ranks()), (me / 2, 2));
        // One pair runs more rounds than the other.
        for _ in 0..[1, 20][me % 2] {
            child.barrier()?;
            assert_eq!(sum(&child, rank)?, [2.0, 4.0][me % 2]);
            let grandchild = child.split(Some(0), 0, &CommConfig::new())?.unwrap();
            grandchild.barrier()?;
            grandchild.destroy()?;
        }
        comm.barrier()?;
        child.create_dev_comm(DevCommRequirements::new().lsa_barriers(2)).map(drop)
    });
}

#[test]
fn a_child_outlives_its_parent() {
    ranks(2, |rank| {
        let comm = rank.new_communicator(&CommConfig::new())?;
        let child = comm.split(Some(0), 0, &CommConfig::new())?.unwrap();
        comm.destroy()?;
        assert_eq!(sum(&child, rank)?, 1.0);
        drop(comm);
        child.barrier()
    });
}

#[test]
fn a_shrink_leaves_the_excluded_ranks_out() {
    ranks(4, |rank| {
        let (me, comm) = (rank.rank(), rank.communicator()?);
        if matches!(me, 1 | 2) {
            return Ok(());
        }
        for (mode, flags) in [(ShrinkMode::Idle, 0), (ShrinkMode::Abort, 1)] {
            let config = CommConfig::new();
            let (child, log) = logged(rank, || comm.shrink(&[1, 2], mode, &config));
            let child = child?;
            assert_eq!(log, [format!("ncclCommShrink without 2 from 1 flags {flags}")]);
            assert_eq!((child.rank(), child.n_ranks()), (me / 3, 2));
            child.barrier()?;
            assert_eq!(sum(&child, rank)?, 3.0);
        }
        Ok(())
    });
}

#[test]
fn a_shrink_that_makes_no_sense_is_refused_before_nccl_is_called() {
    ranks(3, |rank| {
        let (me, comm) = (rank.rank(), rank.communicator()?);
        makes_no_calls(rank, || {
            let next = (me + 1) % 3;
            for exclude in [&[][..], &[me], &[3], &[next, next]] {
                assert_invalid(comm.shrink(exclude, ShrinkMode::Idle, &CommConfig::new()));
            }
        });
        Ok(())
    });
}

#[test]
fn a_communicator_grows_by_new_ranks_and_old_ones_keep_their_numbers() {
    let ran = ranks(3, |rank| {
        let (me, library, context) = (rank.rank(), rank.library(), rank.context());
        let config = CommConfig::new();
        let own = library.unique_id()?;
        let of_root = |bytes: &[u8; 128]| {
            let bytes = rank.broadcast(0, bytes)?;
            Ok::<_, Error>(devcomm_host::UniqueId::from_bytes(&bytes).unwrap())
        };
        let id = of_root(own.as_bytes())?;
        let grown = if me == 2 {
            let id = of_root(own.as_bytes())?;
            assert_invalid(Communicator::join_grown(library, context, &id, 3, 3, &config));
            Communicator::join_grown(library, context, &id, 2, 3, &config)?
        } else {
            let comm = Communicator::init_rank(library, context, &id, me, 2, &config)?;
            assert_invalid(comm.grow(2, None, &config));
            let own = if me == 0 { comm.unique_id()? } else { own };
            of_root(own.as_bytes())?;
            let grown = comm.grow(3, (me == 0).then_some(&own), &config)?;
            assert_eq!(comm.identity()?.1, 2);
            comm.destroy()?;
            grown
        };
        assert_eq!(grown.identity()?, (me as i32, 3, me as i32));
        assert_eq!((grown.rank(), sum(&grown, rank)?), (me, 3.0));
        // A new rank may belong to another job, so there is no world for a host barrier.
        assert_invalid(grown.barrier());
        Ok(())
    });
    let grown = |gpu: usize| {
        log_in(&ran.world, gpu).into_iter().find(|line| line.starts_with("ncclCommGrow")).unwrap()
    };
    let [first, second, new] = [0, 1, 2].map(grown);
    assert_eq!(first, "ncclCommGrow to 3 rank -1 with id");
    assert_eq!(second, "ncclCommGrow to 3 rank -1");
    assert_eq!(new, "ncclCommGrow to 3 rank 2 with id new");
}

/// The longest time until a communicator that does not block is ready.
const LIMIT: Duration = Duration::from_secs(5);

/// Returns a communicator that does not block, ready for use.
fn not_blocking(rank: &Rank) -> Result<Communicator> {
    let comm = rank.new_communicator(&CommConfig::new().blocking(false))?;
    comm.wait(LIMIT).map(|()| comm)
}

/// Grows a communicator of ranks 0 and 1 by rank 2.
fn grow(rank: &Rank) -> Result<()> {
    let (library, context, config) =
        (rank.library(), rank.context(), CommConfig::new().blocking(false));
    let id_of_root = |own: &UniqueId| {
        let bytes = rank.broadcast(0, own.as_bytes())?;
        Ok::<_, Error>(UniqueId::from_bytes(&bytes).unwrap())
    };
    let own = library.unique_id()?;
    let id = id_of_root(&own)?;
    if rank.rank() == 2 {
        let id = id_of_root(&own)?;
        return Communicator::join_grown(library, context, &id, 2, 3, &config).map(drop);
    }
    let comm = Communicator::init_rank(library, context, &id, rank.rank(), 2, &config)?;
    comm.wait(LIMIT)?;
    let own = if rank.is_root() { comm.unique_id()? } else { own };
    id_of_root(&own)?;
    comm.grow(3, rank.is_root().then_some(&own), &config).map(drop)
}

#[test]
fn a_child_that_is_not_ready_for_use_is_ended() {
    let config = CommConfig::new().blocking(false);
    let split = |rank: &Rank| not_blocking(rank)?.split(Some(0), 0, &config).map(drop);
    let shrink = |rank: &Rank| {
        let comm = not_blocking(rank)?;
        comm.shrink(&[(rank.rank() + 1) % 2], ShrinkMode::Idle, &config).map(drop)
    };
    type Makes<'a> = &'a (dyn Fn(&Rank) -> Result<()> + Sync);
    let cases: [(_, _, Makes<'_>); 3] =
        [("ncclCommSplit", 2, &split), ("ncclCommShrink", 2, &shrink), ("ncclCommGrow", 3, &grow)];
    for (function, n, makes) in cases {
        // 6 is the code of `ncclRemoteError`, and 2 that of `ncclSystemError`.
        for (fails, effect) in [(function, Effect::Later(6)), ("ncclCommCount", Effect::Fail(2))] {
            let world = world(n);
            inject(&world, fails, None, effect);
            let made = world.run(|rank| {
                let made = makes(rank);
                rank.barrier()?;
                Ok::<_, Error>(made.is_ok())
            });
            // A rank that joins has no parent, and asks for no count.
            assert_eq!(made.unwrap(), (0..n).map(|rank| rank == 2).collect::<Vec<_>>());
            for gpu in 0..n {
                let log = log_in(&world, gpu);
                let count = |call| count(&log, call);
                let made = count("ncclCommInitRankScalable") + count(function);
                let ended = count("ncclCommDestroy") + count("ncclCommAbort");
                assert_eq!(made, ended, "{fails}: {log:#?}");
            }
        }
    }
}

/// The deadline of NCCL calls, in the last two tests.
const DEADLINE: Duration = Duration::from_secs(1);

/// Splits `comm`, which does not block, on rank 0 while rank 1 is absent until long after the
/// deadline.
fn split_alone(rank: &Rank, comm: &Communicator) -> Result<()> {
    let start = rank.simulated_machine().unwrap().now();
    let made = comm.split(Some(0), 0, &CommConfig::new());
    if rank.rank() == 1 {
        pause(rank, 10 * DEADLINE);
        return Ok(());
    }
    match made {
        Err(Error::State(StateError::NotReturned { operation: "ncclCommSplit", waited })) => {
            assert!(waited >= DEADLINE);
        }
        other => panic!("{other:?}"),
    }
    assert!(rank.simulated_machine().unwrap().now() - start < 2 * DEADLINE);
    assert_ended(comm.identity(), "aborted");
    Ok(())
}

/// Runs `f` in two ranks. Rank 1's `ncclCommSplit` fails at once, so that of rank 0 does not end.
fn with_an_absent_rank(f: impl Fn(&Rank) -> Result<()> + Sync) {
    let builder = World::builder().deadline(Some(DEADLINE)).simulate(simulation());
    let world = builder.threads(2).unwrap();
    inject(&world, "ncclCommSplit", 1, Effect::Fail(2));
    world.run(f).unwrap();
    assert!(now(&world) > 10 * DEADLINE);
}

#[test]
fn a_call_in_the_background_has_the_deadline_of_the_job() {
    with_an_absent_rank(|rank| split_alone(rank, &not_blocking(rank)?));
}

#[test]
fn a_communicator_without_a_world_has_the_deadline_of_its_context() {
    with_an_absent_rank(|rank| {
        let context = Context::with_deadline(rank.device(), Some(DEADLINE))?;
        let bytes = rank.broadcast(0, rank.library().unique_id()?.as_bytes())?;
        let (id, config) =
            (UniqueId::from_bytes(&bytes).unwrap(), CommConfig::new().blocking(false));
        let comm = Communicator::init_rank(rank.library(), &context, &id, rank.rank(), 2, &config)?;
        comm.wait(LIMIT)?;
        split_alone(rank, &comm)
    });
}
