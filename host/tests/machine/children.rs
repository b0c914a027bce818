//! Tests of communicators created from others by split, shrink and grow.

use devcomm_host::{
    CommConfig, Communicator, DevCommError, DevCommRequirements, Error, Rank, ReduceOp, Result,
    ShrinkMode,
};

use crate::support::{
    contents, filled, is_invalid, log_in, logged, makes_no_calls, ranks, ranks_on, simulation,
};

/// The sum of the world ranks of a communicator's ranks.
fn sum(comm: &Communicator, rank: &Rank) -> Result<f32> {
    let (b, stream) = (filled(comm, &[rank.rank() as f32])?, rank.stream()?);
    comm.all_reduce(&b, &b, ReduceOp::Sum, &stream)?;
    Ok(contents(&b)[0])
}

#[test]
fn a_split_orders_ranks_by_key_and_leaves_out_who_has_no_color() {
    let ran = ranks_on(simulation().multimem(false), 4, |rank| {
        let (me, comm) = (rank.rank(), rank.communicator()?);
        is_invalid(comm.split(Some(-1), 0, &CommConfig::new()));
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
            Err(Error::DevComm(DevCommError::Refused { rank: 0, others: 0, .. })) => {}
            other => panic!("{other:?}"),
        }
        Ok(Some((child.rank(), child.n_ranks())))
    });
    assert_eq!(ran.results, [Some((2, 3)), Some((1, 3)), None, Some((0, 3))]);
}

#[test]
fn children_work_beside_each_other_and_wait_for_their_own_members_only() {
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
                is_invalid(comm.shrink(exclude, ShrinkMode::Idle, &CommConfig::new()));
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
            is_invalid(Communicator::join_grown(library, context, &id, 3, 3, &config));
            Communicator::join_grown(library, context, &id, 2, 3, &config)?
        } else {
            let comm = Communicator::init_rank(library, context, &id, me, 2, &config)?;
            is_invalid(comm.grow(2, None, &config));
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
        is_invalid(grown.barrier());
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
