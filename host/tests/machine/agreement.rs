//! Tests that a collective call with options that differ, or that fails on one rank, is an error on
//! all ranks, after which the ranks' later calls match.

use devcomm_host::{
    CommConfig, Communicator, DevCommRequirements, Effect, Error, Fault, NcclError, Rank, ReduceOp,
    Result, ShrinkMode, Simulation, StateError, StreamOrder, Window, WindowFlags, World,
    WorldError,
};

use crate::support::{contents, filled, ranks, unchecked_world};

/// Checks that this option of the call differs between ranks 0 and 1.
#[track_caller]
fn differs<T>(result: Result<T>, call: &str, option: &str, values: [&str; 2]) {
    match result.map(drop) {
        Err(Error::World(WorldError::OptionsDiffer {
            call: told,
            option: which,
            first: (0, first),
            second: (1, second),
        })) => assert_eq!((&*told, &*which, [&*first, &*second]), (call, option, values)),
        other => panic!("{call}: {other:?}"),
    }
}

/// Checks that rank 1 failed in the call: rank 1 has an error of its own.
#[track_caller]
fn failed_on_1<T>(rank: &Rank, result: Result<T>, call: &str) {
    match (rank.rank(), result.map(drop)) {
        (1, Err(Error::Nccl(NcclError::Failed { .. }) | Error::InvalidInput { .. })) => {}
        (0, Err(Error::World(WorldError::CallFailed { call: told, rank: 1, others: 0, .. }))) => {
            assert_eq!(told, call);
        }
        (_, other) => panic!("{call}: {other:?}"),
    }
}

/// Checks that the ranks' calls match.
fn sum(comm: &Communicator, rank: &Rank) -> Result<()> {
    let (ones, stream) = (filled(comm, &[1.0_f32; 4])?, rank.stream()?);
    comm.all_reduce(&ones, &ones, ReduceOp::Sum, &stream)?;
    stream.synchronize()?;
    assert_eq!(contents(&ones), [comm.n_ranks() as f32; 4]);
    Ok(())
}

#[test]
fn memory_that_one_rank_does_not_get_is_an_error_on_all_and_a_later_call_matches() {
    for checked in [false, true] {
        let world = World::builder().checked(checked).simulate(Simulation::new(2));
        let world = world.threads(2).unwrap();
        let (function, gpu, nth, effect) = ("ncclMemAlloc", Some(1), Some(0), Effect::Fail(1));
        world.simulated_machine().unwrap().inject(Fault { function, gpu, nth, effect });
        let ran = world.run(|rank| {
            let comm = rank.communicator()?;
            failed_on_1(rank, comm.window::<f32>(10), "register_window");
            let window: Window<f32> = comm.window(10 + rank.rank())?;
            assert_eq!((window.len_of(0), window.len_of(1)), (Some(10), Some(11)));
            sum(comm, rank)
        });
        ran.unwrap();
    }
}

#[test]
fn arguments_that_one_rank_refuses_are_an_error_on_all() {
    ranks(2, |rank| {
        let (comm, me) = (rank.communicator()?, rank.rank());
        failed_on_1(rank, comm.window::<f32>(1 - me), "register_window");
        failed_on_1(rank, comm.split(Some(-(me as i32)), 0, &CommConfig::new()), "split");
        let config = CommConfig::new().max_ctas(1 - me as u32);
        failed_on_1(rank, comm.split(Some(0), 0, &config), "split");
        failed_on_1(rank, rank.new_communicator(&config), "new_communicator");
        failed_on_1(rank, comm.grow(3 - me, None, &CommConfig::new()), "grow");
        sum(comm, rank)
    });
}

#[test]
fn collectives_are_compared_in_debug_builds_and_if_the_program_says_so() {
    let builds = [
        (World::builder(), cfg!(debug_assertions)),
        (World::builder().checked(true), true),
        (World::builder().checked(false), false),
    ];
    for (builder, compared) in builds {
        let world = builder.simulate(Simulation::new(2)).threads(2).unwrap();
        let ran = world.run(|rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let memory = comm.mem_alloc::<f32>(4 + rank.rank())?;
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            stream.synchronize()
        });
        let differs = matches!(ran, Err(Error::World(WorldError::CallsDiffer { .. })));
        assert_eq!(differs, compared, "{ran:?}");
    }
}

#[test]
fn options_that_differ_are_named_with_both_ranks_in_every_world() {
    ranks(3, options_differ);
    unchecked_world(3).run(options_differ).unwrap();
}

fn options_differ(rank: &Rank) -> Result<()> {
    let (comm, me) = (rank.communicator()?, rank.rank());
    let memory = comm.mem_alloc::<f32>(8)?;
    let flags = [WindowFlags::COLL_SYMMETRIC, WindowFlags::STRICT_ORDERING][me.min(1)];
    let names = ["WindowFlags(COLL_SYMMETRIC)", "WindowFlags(STRICT_ORDERING)"];
    differs(comm.register_window(&memory, flags), "register_window", "flags", names);

    let config = CommConfig::new().max_ctas(8 + me.min(1) as u32);
    let ctas = ["8", "9"];
    differs(rank.new_communicator(&config), "new_communicator", "max_ctas", ctas);
    let none = CommConfig::new();
    differs(comm.grow(4 + me, None, &none), "grow", "n_ranks", ["4", "5"]);
    match comm.split(Some(0), 0, &config) {
        Err(Error::InvalidInput { what }) => {
            assert!(what.contains("ranks 0 and 1 have color 0"), "{what}");
        }
        other => panic!("{other:?}"),
    }
    // Ranks of different colors may have different configurations.
    comm.split(Some(me as i32), 0, &config)?;
    if me < 2 {
        let mode = [ShrinkMode::Idle, ShrinkMode::Abort][me];
        differs(comm.shrink(&[2], mode, &none), "shrink", "mode", ["Idle", "Abort"]);
    }
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1 + me.min(1) as u32));
    differs(dev, "create_dev_comm", "lsa_barriers", ["1", "2"]);
    sum(comm, rank)
}

#[test]
fn calls_on_a_communicator_that_has_ended_do_not_wait_for_the_others() {
    for how in ["finalized", "destroyed", "aborted"] {
        ranks(2, |rank| {
            let memory = rank.communicator()?.mem_alloc::<f32>(8)?;
            let comm = rank.new_communicator(&CommConfig::new())?;
            match how {
                "finalized" => comm.finalize()?,
                "destroyed" => comm.destroy()?,
                _ => comm.abort()?,
            }
            if rank.is_root() {
                let (config, order) = (CommConfig::new(), StreamOrder::local(rank.context()));
                let (flags, requirements) = (WindowFlags::empty(), DevCommRequirements::new());
                for (call, result) in [
                    ("split", comm.split(Some(0), 0, &config).map(drop)),
                    ("shrink", comm.shrink(&[1], ShrinkMode::Idle, &config).map(drop)),
                    ("grow", comm.grow(3, None, &config).map(drop)),
                    ("window", comm.window::<f32>(8).map(drop)),
                    ("register_window", comm.register_window(&memory, flags).map(drop)),
                    ("create_dev_comm", comm.create_dev_comm(requirements).map(drop)),
                    ("mem_alloc", comm.mem_alloc::<f32>(8).map(drop)),
                    ("barrier", comm.barrier()),
                    ("host_all_gather", comm.host_all_gather(&[1_u8]).map(drop)),
                    ("compare_kernel", comm.compare_kernel(&order, String::new)),
                ] {
                    match result {
                        Err(Error::State(StateError::CommunicatorEnded { rank: 0, how: told })) => {
                            assert_eq!(told, how, "{call}");
                        }
                        other => panic!("{call} after it is {how}: {other:?}"),
                    }
                }
            }
            rank.barrier()
        });
    }
}
