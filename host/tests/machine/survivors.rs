//! Tests of ranks that go on after another one is lost.

use std::sync::Mutex;

use devcomm_host::{
    Communicator, Error, Rank, ReduceOp, Result, Simulation, StateError, Stream, SymmetricBuffer,
    World, WorldError,
};

use crate::support::{contents, filled};

fn failure(what: String) -> Error {
    Error::InvalidInput { what }
}

/// Returns the sum over all ranks of each one's element.
fn sum(comm: &Communicator, of: &SymmetricBuffer<f32>, stream: &Stream) -> Result<f32> {
    let sum = comm.mem_alloc::<f32>(1)?;
    comm.all_reduce(of, &sum, ReduceOp::Sum, stream)?;
    stream.synchronize()?;
    Ok(contents(&sum)[0])
}

/// Sums until a rank is lost, goes on, and returns the sum over the last remaining ranks. The ranks
/// in `fail` fail, one after the other.
fn sum_until(rank: &Rank, fail: &[usize]) -> Result<f32> {
    let own = rank.rank();
    let stream = rank.stream()?;
    // The stream and this buffer outlive the worlds.
    let weight = filled(rank.communicator()?, &[(1 << own) as f32])?;
    let mut world: Option<Rank> = None;
    for (round, victim) in fail.iter().enumerate() {
        let rank = world.as_ref().unwrap_or(rank);
        let comm = rank.communicator()?;
        let window = comm.window::<f32>(64)?;
        for _ in 0..3 {
            sum(comm, &weight, &stream)?;
        }
        if own == *victim {
            return Err(failure(format!("failure {round}")));
        }
        let lost = sum(comm, &weight, &stream).unwrap_err();
        assert!(matches!(lost, Error::World(WorldError::RankLost { .. })), "{lost}");
        let next = rank.shrink()?;
        assert_eq!(next.n_ranks(), rank.n_ranks() - 1);
        assert!(!comm.is_valid() && !window.is_valid());
        let ended = comm.all_reduce(&weight, &weight, ReduceOp::Sum, &stream).unwrap_err();
        assert!(matches!(ended, Error::World(WorldError::RankLost { .. })), "{ended}");
        world = Some(next);
    }
    let rank = world.as_ref().unwrap_or(rank);
    sum(rank.communicator()?, &weight, &stream)
}

#[test]
fn eight_ranks_become_seven_and_six_with_their_memory_and_streams() {
    for fail in [[5, 0], [0, 7], [7, 6]] {
        let world = World::builder().simulate(Simulation::new(8)).threads(8).unwrap();
        let ended = Mutex::new(Vec::new());
        let failed = world.run(|rank| {
            let result = sum_until(rank, &fail);
            let sum = result.as_ref().map_or_else(|error| Err(error.to_string()), |sum| Ok(*sum));
            ended.lock().unwrap().push((rank.rank(), sum));
            result
        });
        assert!(failed.unwrap_err().to_string().contains("failure 0"));
        let mut ended = ended.into_inner().unwrap();
        ended.sort_by_key(|(rank, _)| *rank);
        let left: i32 = (0..8).filter(|rank| !fail.contains(rank)).map(|rank| 1 << rank).sum();
        for (rank, sum) in ended {
            match fail.iter().position(|victim| *victim == rank) {
                Some(round) => assert!(sum.unwrap_err().contains(&format!("failure {round}"))),
                None => assert_eq!(sum, Ok(left as f32), "rank {rank}"),
            }
        }
    }
}

#[test]
fn a_rank_goes_on_once_and_only_after_a_loss_outside_of_groups() {
    let world = World::simulated(2).unwrap();
    let failed = world.run(|rank| {
        let refused = |result: Result<Rank>| result.err().unwrap();
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let weight = filled(comm, &[3.0_f32])?;
        assert!(refused(rank.shrink()).to_string().contains("no rank is lost"));
        // The refusal has ended no communicator.
        assert_eq!(sum(comm, &weight, &stream)?, 6.0);
        rank.barrier()?;
        if rank.rank() == 1 {
            return Err(failure("it fails".to_owned()));
        }
        rank.barrier().unwrap_err();
        let grouped = devcomm_host::group(|_| rank.shrink());
        assert!(matches!(refused(grouped), Error::State(StateError::InGroup { .. })));
        let alone = rank.shrink()?;
        assert_eq!((alone.rank(), alone.n_ranks(), alone.hosts().len()), (0, 1, 1));
        assert!(refused(rank.shrink()).to_string().contains("a world already"));
        let stream = alone.stream()?;
        let weight = filled(alone.communicator()?, &[3.0_f32])?;
        assert_eq!(sum(alone.communicator()?, &weight, &stream)?, 3.0);
        alone.barrier()
    });
    assert!(failed.unwrap_err().to_string().contains("it fails"));
}
