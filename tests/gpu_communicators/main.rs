//! Tests of communicators on GPUs: their properties, creation, and end.

mod children;
mod ends;
mod multi_gpu;
mod threads;

use std::time::{Duration, Instant};

use devcomm::{CommConfig, Communicator, Context, Error, MemoryStat, Rank, UniqueId, visible_gpus};
use devcomm_testing::machines::on_gpus;
use devcomm_testing::works::{require_kernels_work, require_works};

/// How long a non-blocking operation may take.
const LIMIT: Duration = Duration::from_secs(60);

fn properties_are_right(rank: &Rank) -> Result<(), Error> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (me, n) = (rank.rank(), rank.n_ranks());
    assert_eq!((comm.rank(), comm.n_ranks(), comm.device()), (me, n, rank.device()));
    assert_eq!(comm.identity()?, (me as i32, n as i32, rank.device() as i32));
    assert!(comm.is_valid() && comm.is_ready()? && !comm.as_raw().is_null());
    comm.async_error()?;
    require_works(comm, &stream)?;

    let properties = comm.properties()?;
    assert_eq!((properties.rank, properties.n_ranks), (me, n));
    assert_eq!(properties.cuda_device, rank.device() as i32);
    assert!(properties.device_api);
    assert_eq!((properties.n_lsa_teams, properties.lsa_size()), (1, n));
    assert_eq!(comm.gin_type()?, properties.gin_type);
    assert_eq!(comm.railed_gin_type()?, properties.railed_gin_type);
    // Each communicator has its own hash, the same on all ranks.
    let hash_of = |comm: &Communicator| comm.properties().map(|known| known.comm_hash);
    let hash = hash_of(comm)?;
    let hashes = rank.all_gather(&hash.to_le_bytes())?;
    assert!(hashes.iter().all(|other| *other == hash.to_le_bytes()), "{hashes:?}");
    assert_ne!(hash_of(&rank.new_communicator(&CommConfig::new())?)?, hash);

    let stat = |stat| comm.memory_stat(stat);
    assert_eq!(stat(MemoryStat::Suspended)?, 0);
    let total = stat(MemoryStat::Total)?;
    // The simulated NCCL reports no memory.
    assert!(total > 0 || rank.is_simulated());
    assert!(stat(MemoryStat::Suspendable)? <= total && stat(MemoryStat::Persistent)? <= total);
    Ok(())
}

#[test]
fn properties_are_right_on_two_gpus() {
    on_gpus("properties_are_right_on_two_gpus", 2, properties_are_right);
}

#[test]
fn properties_are_right_on_four_gpus() {
    on_gpus("properties_are_right_on_four_gpus", 4, properties_are_right);
}

fn teams_are_right(rank: &Rank) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let (me, n) = (rank.rank(), rank.n_ranks());
    // All ranks are in one LSA team, so each is the only rank of its rail.
    let (world, lsa, rail) = (comm.team_world()?, comm.team_lsa()?, comm.team_rail()?);
    assert_eq!((world.n_ranks, world.rank, world.stride), (n as i32, me as i32, 1));
    assert_eq!((lsa.n_ranks, lsa.rank, lsa.stride), (n as i32, me as i32, 1));
    assert_eq!((rail.n_ranks, rail.rank), (1, 0));
    for rank in 0..n {
        assert_eq!(comm.rank_to_world(world, rank)?, rank);
        assert_eq!(comm.rank_to_world(lsa, rank)?, rank);
        assert_eq!(comm.rank_to_lsa(world, rank)?, rank);
        assert_eq!(comm.rank_to_lsa(lsa, rank)?, rank);
    }
    assert_eq!(comm.rank_to_world(rail, 0)?, me);
    assert_eq!(comm.rank_to_lsa(rail, 0)?, me);
    for (team, rank) in [(world, n), (lsa, usize::MAX), (rail, 1)] {
        let refused = comm.rank_to_world(team, rank);
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
    }
    Ok(())
}

#[test]
fn teams_are_right_on_two_gpus() {
    on_gpus("teams_are_right_on_two_gpus", 2, teams_are_right);
}

#[test]
fn teams_are_right_on_four_gpus() {
    on_gpus("teams_are_right_on_four_gpus", 4, teams_are_right);
}

#[test]
fn several_ids_make_one_communicator() {
    on_gpus("several_ids_make_one_communicator", 2, |rank| {
        let id = rank.library().unique_id()?;
        let ids = rank.all_gather(id.as_bytes())?;
        let ids: Vec<_> = ids.iter().map(|id| UniqueId::from_bytes(id).unwrap()).collect();
        let comm = Communicator::init_rank_scalable(
            rank.library(),
            rank.context(),
            &ids,
            rank.rank(),
            rank.n_ranks(),
            &CommConfig::new(),
        )?;
        let stream = rank.stream()?;
        require_works(&comm, &stream)?;
        require_kernels_work(rank, &comm, &stream)?;
        // `init_rank_scalable` has no `World`, which host barriers need.
        assert!(matches!(comm.barrier(), Err(Error::InvalidInput { .. })));
        comm.destroy()
    });
}

#[test]
fn invalid_ranks_and_ids_are_refused() {
    on_gpus("invalid_ranks_and_ids_are_refused", 2, |rank| {
        let (library, context, config) = (rank.library(), rank.context(), CommConfig::new());
        let id = library.unique_id()?;
        let init = |ids: &[UniqueId], me, n| {
            Communicator::init_rank_scalable(library, context, ids, me, n, &config)
        };
        for refused in
            [init(&[id], 2, 2), init(&[id], 0, 0), init(&[], 0, 2), init(&[id, id, id], 0, 2)]
        {
            assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
        }
        require_works(rank.communicator()?, &rank.stream()?)
    });
}

#[test]
fn a_non_blocking_communicator_does_what_a_blocking_one_does() {
    on_gpus("a_non_blocking_communicator_does_what_a_blocking_one_does", 2, |rank| {
        let config = CommConfig::new().blocking(false);
        let (comm, stream) = (rank.new_communicator(&config)?, rank.stream()?);
        let started = Instant::now();
        while !comm.is_ready()? {
            assert!(started.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(1));
        }
        comm.wait(LIMIT)?;
        require_works(&comm, &stream)?;
        comm.wait(LIMIT)?;
        require_kernels_work(rank, &comm, &stream)?;
        comm.wait(LIMIT)?;
        // The child inherits `blocking`, which its configuration does not set.
        let child = comm.split(Some(0), 0, &CommConfig::new())?.unwrap();
        child.wait(LIMIT)?;
        require_works(&child, &stream)?;
        child.destroy()?;
        comm.destroy()?;
        comm.destroy()
    });
}

#[test]
fn a_borrowed_raw_communicator_works_and_is_not_destroyed() {
    on_gpus("a_borrowed_raw_communicator_works_and_is_not_destroyed", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        // SAFETY: `raw` is a live communicator on this GPU, which outlives the borrowed one and is
        // not used at the same time; or null.
        let adopt = |context: &Context, raw| unsafe {
            Communicator::from_raw(rank.library(), context, raw)
        };
        let null = adopt(rank.context(), std::ptr::null_mut());
        assert!(matches!(null, Err(Error::InvalidInput { .. })), "{null:?}");
        // With NCCL_MULTI_RANK_GPU_ENABLE=1 the ranks may share the only GPU: then no other GPU has
        // a context to pass.
        if rank.is_simulated() || visible_gpus().is_ok_and(|gpus| gpus > 1) {
            let elsewhere = adopt(&Context::new(1 - rank.device())?, comm.as_raw());
            assert!(matches!(elsewhere, Err(Error::InvalidInput { .. })), "{elsewhere:?}");
        }

        let foreign = adopt(rank.context(), comm.as_raw())?;
        assert_eq!((foreign.rank(), foreign.n_ranks()), (rank.rank(), rank.n_ranks()));
        require_works(&foreign, &stream)?;
        require_kernels_work(rank, &foreign, &stream)?;
        foreign.destroy()?;
        assert!(!foreign.is_valid() && comm.is_valid());
        drop(foreign);
        require_works(comm, &stream)
    });
}
