//! Tests of operations that fill the GPU, which the ranks call in opposite order.

use std::time::Duration;

use devcomm::{
    CollectivesOptions, Error, ExpertParallelOptions, GemmAllReduce, LaunchError, Rank, ReduceOp,
    Result, Simulation, Stream, Tokens, World, WorldError,
};
use devcomm_testing::machines::Gpus;
use half::bf16;

/// An operation of an object and the stream on which it is called.
type Operation = (Box<dyn Fn() -> Result<()>>, Stream);

/// Makes an object for a stream.
type Make = fn(&Rank) -> Result<Operation>;

fn collectives(rank: &Rank) -> Result<Operation> {
    all_reduce(rank, 1)
}

fn collectives_of_a_half(rank: &Rank) -> Result<Operation> {
    all_reduce(rank, 2)
}

/// Makes `Collectives` of which `concurrent` have room on the GPU.
fn all_reduce(rank: &Rank, concurrent: u32) -> Result<Operation> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let options = CollectivesOptions::new().concurrent(concurrent).lamport_bytes(1024);
    let (collectives, memory) = (options.push_blocks(2).build(comm)?, comm.window::<f32>(64)?);
    let on = stream.clone();
    let call = move || collectives.all_reduce(&memory, &memory, ReduceOp::Sum, &on);
    Ok((Box::new(call), stream))
}

fn product(rank: &Rank) -> Result<Operation> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
    let (c, product) = (comm.window::<bf16>(64 * 64)?, GemmAllReduce::new(comm, &stream, 64, 64)?);
    Ok((Box::new(move || product.launch(&a, &b, &c, [64; 3])), stream))
}

fn experts(rank: &Rank) -> Result<Operation> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let experts = ExpertParallelOptions::new(64, 2, 2, 1).build(comm)?;
    let input = comm.mem_alloc::<bf16>(2 * 64)?;
    let (ids, weights) = (comm.mem_alloc::<i32>(2)?, comm.mem_alloc::<f32>(2)?);
    let on = stream.clone();
    let call = move || {
        let tokens = Tokens { count: 2, input: &input, ids: &ids, weights: &weights };
        experts.dispatch(tokens, &on)
    };
    Ok((Box::new(call), stream))
}

/// Two objects that fill the GPU, and their names.
const PAIRS: [([Make; 2], [&str; 2]); 4] = [
    ([collectives, collectives], ["Collectives 1", "Collectives 2"]),
    ([collectives, product], ["Collectives 1", "GemmAllReduce 1"]),
    ([product, experts], ["GemmAllReduce 1", "ExpertParallel 1"]),
    ([experts, experts], ["ExpertParallel 1", "ExpertParallel 2"]),
];

/// An object that does not fill the GPU, and one that does.
const MIXED: [Make; 2] = [collectives_of_a_half, product];

/// Checks that ranks are told whose operations they call in opposite order.
fn refuses(make: [Make; 2], objects: [&str; 2]) {
    Gpus::new(2).run("a_checked_world_refuses_opposite_order", |rank| {
        let [first, second] = [make[0](rank)?, make[1](rank)?];
        let (call, stream) = if rank.is_root() { &first } else { &second };
        match call() {
            Err(Error::World(WorldError::CallsDiffer { calls })) => {
                let are_told = calls.iter().zip(objects).all(|(call, object)| {
                    call.strip_suffix(object).is_some_and(|call| call.ends_with(", of "))
                });
                assert!(calls.len() == 2 && are_told, "{calls:?}, not {objects:?}");
            }
            other => panic!("{objects:?}: {other:?}"),
        }
        // Nothing was launched, and calls in the same order work.
        assert!(stream.is_idle()?);
        [&second, &first].into_iter().try_for_each(|(call, _)| call())?;
        [&first, &second].into_iter().try_for_each(|(_, stream)| stream.synchronize())?;
        rank.barrier()
    });
}

#[test]
fn a_checked_world_refuses_operations_that_fill_the_gpu_in_opposite_order_and_names_them() {
    PAIRS.into_iter().for_each(|(make, objects)| refuses(make, objects));
    refuses(MIXED, ["Collectives", "GemmAllReduce 1"]);
}

#[test]
fn a_checked_world_refuses_another_order_of_more_objects_than_have_room() {
    Gpus::new(2).run("a_checked_world_refuses_another_order", |rank| {
        let mut objects = vec![collectives_of_a_half(rank)?, collectives_of_a_half(rank)?];
        let rotate = |objects: &mut Vec<Operation>| objects.rotate_left(rank.rank());
        // There is room for two.
        rotate(&mut objects);
        objects.iter().try_for_each(|(call, _)| call())?;
        rotate(&mut objects);
        objects.push(collectives_of_a_half(rank)?);
        let error = objects[rank.rank()].0().unwrap_err().to_string();
        let expected = ["rank 0 calls ", ", of Collectives 1; rank 1 calls ", ", of Collectives 2"];
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        // There is room again.
        drop(objects.pop());
        rotate(&mut objects);
        objects.iter().try_for_each(|(call, _)| call())?;
        objects.iter().try_for_each(|(_, stream)| stream.synchronize())?;
        rank.barrier()
    });
}

/// Two ranks wait for each other; the one with the shorter deadline gets the error.
#[test]
fn the_error_of_a_deadline_names_the_operations_that_ranks_called_in_opposite_order() {
    let pairs = PAIRS.into_iter().chain([(MIXED, PAIRS[1].1)]);
    for ((make, names), shorter) in pairs.flat_map(|pair| [(pair, 0), (pair, 1)]) {
        let simulation = Simulation::new(2).multiprocessors(2);
        Gpus::from(simulation).unchecked().run("the_error_of_a_deadline_names_both", |rank| {
            let mut objects = [(make[0](rank)?, names[0]), (make[1](rank)?, names[1])];
            rank.barrier()?;
            objects.rotate_left(rank.rank());
            objects.iter().try_for_each(|((call, _), _)| call())?;
            let [_, ((_, last), _)] = &objects;
            if rank.rank() == shorter {
                let ended = last.synchronize_within(Duration::from_millis(500));
                let in_order = objects.each_ref().map(|(_, name)| *name);
                match &ended {
                    Err(error @ Error::Launch(LaunchError::KernelAborted { objects, .. })) => {
                        assert_eq!(*objects, in_order);
                        assert!(error.to_string().contains(&in_order.join(", ")), "{error}");
                    }
                    other => panic!("{names:?}: {other:?}"),
                }
            } else {
                // The other rank's kernels were aborted, so that one of these never ends.
                for ((_, stream), _) in &objects {
                    let _ = stream.synchronize_within(Duration::from_secs(2));
                }
            }
            rank.barrier()
        });
    }
}

#[test]
fn the_report_of_a_simulated_deadlock_names_the_operations_in_opposite_order() {
    let simulation = Simulation::new(2).multiprocessors(2);
    let world = World::builder().checked(false).simulate(simulation).from_env().unwrap();
    let ran = world.run(|rank| {
        let mut objects = [collectives(rank)?, product(rank)?];
        rank.barrier()?;
        objects.rotate_left(rank.rank());
        objects.iter().try_for_each(|(call, _)| call())?;
        objects[1].1.synchronize()
    });
    let report = ran.unwrap_err().to_string();
    let [in_order, opposite] = ["Collectives 1, GemmAllReduce 1", "GemmAllReduce 1, Collectives 1"];
    assert!(report.contains(in_order) || report.contains(opposite), "{report}");
}
