//! Tests that an operation whose ranks have different options, or whose call fails on one rank, is
//! an error on all ranks, and that the ranks are in step afterwards.

use std::num::NonZeroU32;

use devcomm::{
    AllGatherGemm, Buffer, Collectives, CollectivesOptions, Communicator, Effect, Error,
    ExpertParallelOptions, Fault, GemmAllReduce, GemmOptions, GemmReduceScatter, Parts, Rank,
    ReduceOp, Result, Simulation, StateError, Stream, Wire, World, WorldError,
};
use devcomm_testing::machines::{Gpus, on_gpus};

/// Runs `body` in a checked world and in an unchecked one.
fn in_both_worlds(name: &str, body: fn(&Rank) -> Result<()>) {
    on_gpus(name, 2, body);
    Gpus::new(2).unchecked().run(name, body);
}

/// Checks that the ranks are told which option differs.
fn differs(result: Result<()>, call: &str, option: &str, values: [&str; 2]) {
    match result {
        Err(Error::World(WorldError::OptionsDiffer {
            call: told,
            option: which,
            first: (0, first),
            second: (1, second),
        })) => assert_eq!((&*told, &*which, [&*first, &*second]), (call, option, values)),
        other => panic!("{call}, {option}: {other:?}"),
    }
}

/// Checks by an all-reduce that the ranks are in step.
fn sum(comm: &Communicator, stream: &Stream) -> Result<()> {
    let collectives =
        CollectivesOptions::new().lamport_bytes(1 << 10).push_blocks(2).build(comm)?;
    let x = comm.mem_alloc::<f32>(100)?;
    x.copy_from_host(&[1.0; 100])?;
    collectives.all_reduce(&x, &x, ReduceOp::Sum, stream)?;
    stream.synchronize()?;
    let mut sums = [0.0; 100];
    x.copy_to_host(&mut sums)?;
    assert_eq!(sums, [comm.n_ranks() as f32; 100]);
    Ok(())
}

/// Makes an object of the rank that is passed, with an option that has another value on each rank.
type MakeDifferent = fn(&Communicator, &Stream, usize) -> Result<()>;

/// The calls, their options with the values of ranks 0 and 1, and what makes the objects.
const DIFFERENT: [(&str, &str, [&str; 2], MakeDifferent); 21] = {
    const COLLECTIVES: &str = "Collectives::new";
    const EXPERTS: &str = "ExpertParallelOptions::build";
    const FEW: CollectivesOptions = CollectivesOptions::new().lamport_bytes(64).push_blocks(2);
    const OPTIONS: ExpertParallelOptions = ExpertParallelOptions::new(128, 4, 4, 2);
    const fn experts(hidden: usize, experts: usize, top_k: usize) -> ExpertParallelOptions {
        ExpertParallelOptions::new(hidden, 4, experts, top_k)
    }
    [
        (COLLECTIVES, "lamport_bytes", ["4096", "64"], |comm, _, me| {
            FEW.lamport_bytes([4096, 64][me]).build(comm).map(drop)
        }),
        // The default size is not equal to the same size set: its plans follow from measurements.
        (COLLECTIVES, "lamport_bytes", ["the default", "4194304"], |comm, _, me| {
            let options = CollectivesOptions::new();
            let options = if me == 0 { options } else { options.lamport_bytes(4 << 20) };
            options.build(comm).map(drop)
        }),
        (COLLECTIVES, "push_blocks", ["2", "3"], |comm, _, me| {
            FEW.push_blocks(2 + me as u32).build(comm).map(drop)
        }),
        (COLLECTIVES, "concurrent", ["1", "2"], |comm, _, me| {
            FEW.concurrent(1 + me as u32).build(comm).map(drop)
        }),
        ("GemmAllReduce::new", "m", ["64", "128"], |comm, stream, me| {
            GemmAllReduce::new(comm, stream, [64, 128][me], 8).map(drop)
        }),
        ("GemmAllReduce::new", "n", ["64", "128"], |comm, stream, me| {
            GemmAllReduce::new(comm, stream, 8, [64, 128][me]).map(drop)
        }),
        ("GemmAllReduce::new", "max_blocks", ["1", "2"], |comm, stream, me| {
            let blocks = NonZeroU32::MIN.saturating_add(me as u32);
            GemmOptions::new().max_blocks(blocks).build(comm, stream, 8, 8).map(drop)
        }),
        ("GemmAllReduce::new", "wire", ["bf16", "f32"], |comm, stream, me| {
            let wire = [Wire::Bf16, Wire::F32][me];
            GemmOptions::new().wire(wire).build(comm, stream, 8, 8).map(drop)
        }),
        ("GemmReduceScatter::new", "m", ["64", "128"], |comm, stream, me| {
            GemmReduceScatter::new(comm, stream, [64, 128][me], 8).map(drop)
        }),
        ("GemmReduceScatter::new", "n", ["64", "128"], |comm, stream, me| {
            GemmReduceScatter::new(comm, stream, 8, [64, 128][me]).map(drop)
        }),
        ("AllGatherGemm::new", "m", ["64", "128"], |comm, stream, me| {
            AllGatherGemm::new(comm, stream, [64, 128][me], 8).map(drop)
        }),
        ("AllGatherGemm::new", "k", ["64", "128"], |comm, stream, me| {
            AllGatherGemm::new(comm, stream, 8, [64, 128][me]).map(drop)
        }),
        (EXPERTS, "hidden", ["64", "128"], |comm, _, me| {
            experts([64, 128][me], 4, 2).build(comm).map(drop)
        }),
        (EXPERTS, "tokens", ["4", "5"], |comm, _, me| {
            ExpertParallelOptions::new(64, 4 + me, 4, 2).build(comm).map(drop)
        }),
        (EXPERTS, "experts", ["4", "8"], |comm, _, me| {
            experts(64, [4, 8][me], 2).build(comm).map(drop)
        }),
        (EXPERTS, "top_k", ["1", "2"], |comm, _, me| experts(64, 4, 1 + me).build(comm).map(drop)),
        (EXPERTS, "alignment", ["1", "2"], |comm, _, me| {
            OPTIONS.alignment(1 + me).build(comm).map(drop)
        }),
        (EXPERTS, "f8", ["false", "true"], |comm, _, me| {
            if me == 0 { OPTIONS } else { OPTIONS.f8() }.build(comm).map(drop)
        }),
        (EXPERTS, "rows for high throughput", ["8", "9"], |comm, _, me| {
            OPTIONS.throughput(8 + me).build(comm).map(drop)
        }),
        (EXPERTS, "blocks", ["1", "2"], |comm, _, me| {
            OPTIONS.blocks(1 + me as u32).build(comm).map(drop)
        }),
        (EXPERTS, "threads", ["32", "64"], |comm, _, me| {
            OPTIONS.threads(32 + 32 * me as u32).build(comm).map(drop)
        }),
    ]
};

#[test]
fn options_that_differ_are_named_on_all_ranks() {
    in_both_worlds("options_that_differ_are_named_on_all_ranks", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        for (call, option, values, make) in DIFFERENT {
            differs(make(comm, &stream, rank.rank()), call, option, values);
        }
        sum(comm, &stream)
    });
}

#[test]
fn options_that_no_kernel_can_have_are_refused() {
    on_gpus("options_that_no_kernel_can_have_are_refused", 2, |rank| {
        let (comm, options) = (rank.communicator()?, CollectivesOptions::new());
        // Kernels count the vectors of a message in 32 bits.
        let long = options.lamport_bytes(1 << 40).build(comm).unwrap_err().to_string();
        assert!(long.contains("lamport_bytes: a message of"), "{long}");
        let none = options.push_blocks(0).build(comm).unwrap_err().to_string();
        assert!(none.contains("push_blocks: no blocks"), "{none}");
        sum(comm, &rank.stream()?)
    });
}

/// A function that makes an object of all ranks.
type Make = fn(&Communicator, &Stream) -> Result<()>;

const MAKE: [(&str, Make); 6] = [
    ("Collectives", |comm, _| {
        CollectivesOptions::new().lamport_bytes(1 << 10).build(comm).map(drop)
    }),
    ("ExpertParallel", |comm, _| ExpertParallelOptions::new(64, 4, 4, 2).build(comm).map(drop)),
    ("ExpertParallel for throughput", |comm, _| {
        ExpertParallelOptions::new(64, 4, 4, 2).throughput(8).build(comm).map(drop)
    }),
    ("GemmAllReduce", |comm, stream| GemmAllReduce::new(comm, stream, 64, 64).map(drop)),
    ("GemmReduceScatter", |comm, stream| GemmReduceScatter::new(comm, stream, 64, 64).map(drop)),
    ("AllGatherGemm", |comm, stream| AllGatherGemm::new(comm, stream, 64, 64).map(drop)),
];

/// Makes the `nth` call of `function` fail on rank 1 while the ranks run `make`. Checks that all
/// ranks get an error, and that a later try succeeds. Returns whether there was such a call.
fn fails_on_rank_1(
    (name, make): (&str, Make),
    function: &'static str,
    nth: usize,
    checked: bool,
) -> bool {
    let simulation = Simulation::new(2).multiprocessors(2);
    let world = World::builder().checked(checked).simulate(simulation).threads(2).unwrap();
    let failed = world.run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let machine = rank.simulated_machine().unwrap();
        if rank.rank() == 1 {
            let (nth, effect) = (Some(nth), Effect::Fail(1));
            machine.inject(Fault { function, gpu: Some(1), nth, effect });
        }
        rank.barrier()?;
        let made = make(comm, &stream);
        match (rank.rank(), &made) {
            (_, Ok(())) => return Ok(false),
            (0, Err(Error::World(WorldError::CallFailed { rank: 1, why, .. }))) => {
                assert!(why.contains(function), "{name}: {why}");
            }
            (1, Err(Error::Nccl(_) | Error::Driver(_))) => {}
            (_, other) => panic!("{name}, {function} {nth}: {other:?}"),
        }
        make(comm, &stream)?;
        sum(comm, &stream)?;
        Ok::<_, Error>(true)
    });
    let failed = failed.unwrap_or_else(|error| panic!("{name}, {function} {nth}: {error}"));
    assert_eq!(failed[0], failed[1], "{name}, {function} {nth}");
    failed[0]
}

#[test]
fn whatever_fails_on_one_rank_is_an_error_on_all_and_a_later_try_is_in_step() {
    for what in MAKE {
        // Each allocation of rank 1 fails once; checked and unchecked worlds take turns.
        let fails =
            |nth: &usize| fails_on_rank_1(what, "ncclMemAlloc", *nth, nth.is_multiple_of(2));
        assert!((0..).take_while(fails).count() >= 3, "{}", what.0);
    }
    // All ask for the number of LSA teams by this call.
    for what in MAKE {
        for checked in [false, true] {
            assert!(fails_on_rank_1(what, "ncclCommQueryProperties", 0, checked), "{}", what.0);
        }
    }
}

#[test]
fn a_communicator_that_has_ended_is_refused_without_the_other_ranks() {
    in_both_worlds("a_communicator_that_has_ended_is_refused_without_the_other_ranks", |rank| {
        let stream = rank.stream()?;
        for (name, make) in MAKE {
            let comm = rank.new_communicator(&devcomm::CommConfig::new())?;
            let collectives = Collectives::new(&comm)?;
            let x = rank.communicator()?.mem_alloc::<f32>(8)?;
            comm.destroy()?;
            if rank.is_root() {
                let sum = collectives.all_reduce(&x, &x, ReduceOp::Sum, &stream);
                for refused in [make(&comm, &stream), sum] {
                    let ended = StateError::CommunicatorEnded { rank: 0, how: "destroyed" };
                    let ended = Error::State(ended).to_string();
                    assert_eq!(refused.unwrap_err().to_string(), ended, "{name}");
                }
            }
            rank.barrier()?;
        }
        Ok(())
    });
}

#[test]
fn a_revoked_communicator_launches_no_kernels() {
    in_both_worlds("a_revoked_communicator_launches_no_kernels", |rank| {
        let (comm, stream) = (rank.new_communicator(&devcomm::CommConfig::new())?, rank.stream()?);
        let collectives = Collectives::new(&comm)?;
        let window = comm.window::<f32>(8)?;
        comm.revoke()?;
        assert!(!window.is_valid());
        let sum = collectives.all_reduce(&window, &window, ReduceOp::Sum, &stream);
        let revoked = StateError::CommunicatorEnded { rank: rank.rank(), how: "revoked" };
        assert_eq!(sum.unwrap_err().to_string(), Error::State(revoked).to_string());
        rank.barrier()
    });
}

/// Sends `sent` elements from rank 0 to rank 1, which expects another number.
fn send(rank: &Rank, team_size: usize, [sent, expected]: [usize; 2]) -> Result<()> {
    let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
    // The machine decides the teams of real GPUs.
    assert!(!rank.is_simulated() || comm.properties()?.lsa_size() == team_size);
    let collectives = Collectives::new(comm)?;
    let (x, y) = (comm.mem_alloc::<f32>(2000)?, comm.mem_alloc::<f32>(2000)?);
    let counts = if me == 0 { ([0, sent], [0, 0]) } else { ([0, 0], [expected, 0]) };
    let parts = |counts| Parts { counts, offsets: &[0, 0] };
    let result = collectives.all_to_all_v(&x, parts(&counts.0), &y, parts(&counts.1), &stream);
    let text = format!(
        "all_to_all_v: rank 0 sends rank 1 {sent} elements, and rank 1 receives {expected} from it"
    );
    assert_eq!(result.unwrap_err().to_string(), text);
    Ok(())
}

#[test]
fn counts_that_do_not_match_are_an_error_in_a_checked_world() {
    let name = "counts_that_do_not_match_are_an_error_in_a_checked_world";
    for counts in [[1000, 3], [0, 5], [5, 0]] {
        on_gpus(name, 2, |rank| send(rank, 2, counts));
        let apart = Gpus::from(Simulation::new(2).team_size(1));
        apart.run(name, |rank| send(rank, 1, counts));
    }
}

/// Receives long messages at a different offset in each rank's window.
fn receive(rank: &Rank, windows_differ: bool) -> Result<()> {
    const LONG: usize = 3000;
    let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
    let collectives = CollectivesOptions::new().lamport_bytes(256).push_blocks(2).build(comm)?;
    let send = comm.mem_alloc::<f32>(2 * LONG)?;
    send.copy_from_host(&[1.0; 2 * LONG])?;
    // Rank 1's window is longer, which rank 0 does not know.
    let small = comm.window::<f32>(2 * LONG)?;
    let large = comm.window::<f32>(2 * LONG + 100_000 * me)?;
    let recv = if windows_differ && me == 0 { &small } else { &large };
    let recv = recv.slice(recv.len() - 2 * LONG..)?;
    let parts = Parts { counts: &[LONG; 2], offsets: &[0, LONG] };
    collectives.all_to_all_v(&send, parts, &recv, parts, &stream)?;
    stream.synchronize()?;
    let mut got = [0.0; 2 * LONG];
    recv.copy_to_host(&mut got)?;
    assert_eq!(got, [1.0; 2 * LONG]);
    Ok(())
}

#[test]
fn long_messages_go_to_any_place_of_one_window_and_to_no_other() {
    let name = "long_messages_go_to_any_place_of_one_window_and_to_no_other";
    in_both_worlds(name, |rank| receive(rank, false));
    // Kernels trap, which ends the context on GPUs.
    let world = |checked| {
        let world = World::builder().checked(checked).simulate(Simulation::new(2));
        let ran = world.threads(2).unwrap().run(|rank| receive(rank, true));
        ran.unwrap_err().to_string()
    };
    let compared = world(true);
    assert!(compared.contains("ranks 0 and 1 receive in different windows"), "{compared}");
    let trapped = world(false);
    assert!(trapped.contains("a peer receives in another window"), "{trapped}");
}
