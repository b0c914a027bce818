//! Tests that checked worlds compare the operations that kernels do.

use devcomm::sim::Error as Report;
use devcomm::{
    Buffer, Collectives, CollectivesOptions, Error, GemmAllReduce, Parts, Rank, ReduceOp, Result,
    Simulation, Stream, Window, World, WorldError,
};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

/// Checks that ranks 0 and 1 were told that they call these, which are done by some plan.
fn differ(result: Result<()>, calls: [&str; 2]) {
    match result {
        Err(Error::World(WorldError::CallsDiffer { calls: told })) => {
            let same = told.iter().zip(calls).all(|(told, call)| told.starts_with(call));
            assert!(same && told.len() == 2, "{told:?}, not {calls:?}");
        }
        other => panic!("expected {calls:?}, got {other:?}"),
    }
}

#[test]
fn kernels_of_ranks_that_call_something_else_start_on_no_rank() {
    on_gpus("kernels_of_ranks_that_call_something_else_start_on_no_rank", 2, |rank| {
        let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
        let collectives = Collectives::new(comm)?;
        let (send, recv) = (comm.window::<f32>(128)?, comm.window::<f32>(256)?);
        recv.copy_from_host(&[5.0; 256])?;
        let sum = ReduceOp::Sum;

        let part = |len: usize| Ok::<_, Error>((send.slice(..len)?, recv.slice(..len)?));
        let (from, to) = part(64 + 16 * me)?;
        let counts = collectives.all_reduce(&from, &to, sum, &stream);
        differ(counts, ["all_reduce of 64 f32, Sum by ", "all_reduce of 80 f32, Sum by "]);

        let (from, to) = part(64)?;
        let operators = collectives.all_reduce(&from, &to, [sum, ReduceOp::Max][me], &stream);
        differ(operators, ["all_reduce of 64 f32, Sum by ", "all_reduce of 64 f32, Max by "]);

        let gathered = recv.slice(..128)?;
        let functions = match me {
            0 => collectives.all_gather(&from, &gathered, &stream),
            _ => collectives.reduce_scatter(&from, &recv.slice(..32)?, sum, &stream),
        };
        differ(functions, ["AllGather of 128 f32 by ", "reduce_scatter to 32 f32, Sum by "]);

        stream.synchronize()?;
        let mut got = [0.0; 256];
        recv.copy_to_host(&mut got)?;
        assert_eq!(got, [5.0; 256]);
        send.copy_from_host(&[1.5; 128])?;
        rank.barrier()?;
        collectives.all_reduce(&from, &to, sum, &stream)?;
        stream.synchronize()?;
        recv.copy_to_host(&mut got)?;
        assert_eq!(got[..65], [&[3.0; 64][..], &[5.0]].concat());
        rank.barrier()
    });
}

#[test]
fn products_of_ranks_that_multiply_other_shapes_start_on_no_rank() {
    on_gpus("products_of_ranks_that_multiply_other_shapes_start_on_no_rank", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
        let c = comm.window::<bf16>(64 * 64)?;
        let product = GemmAllReduce::new(comm, &stream, 64, 64)?;
        let shapes = product.launch(&a, &b, &c, [64, 64 - 8 * rank.rank(), 64]);
        differ(shapes, ["product of 64 x 64 x 64 by ", "product of 64 x 56 x 64 by "]);
        assert!(stream.is_idle()?);
        product.launch(&a, &b, &c, [64; 3])?;
        stream.synchronize()
    });
}

#[test]
fn products_are_not_compared_in_an_unchecked_world() {
    Gpus::new(2).unchecked().run("products_are_not_compared_in_an_unchecked_world", |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
        let c = comm.window::<bf16>(64 * 64)?;
        [&a, &b].into_iter().try_for_each(|factor| factor.copy_from_host(&[bf16::ONE; 64 * 64]))?;
        let product = GemmAllReduce::new(comm, &stream, 64, 64)?;
        // Rank 1 comes to the barrier first, which an exchange would take for another call.
        if rank.is_root() {
            product.launch(&a, &b, &c, [64; 3])?;
        }
        rank.barrier()?;
        if !rank.is_root() {
            product.launch(&a, &b, &c, [64; 3])?;
        }
        stream.synchronize()?;
        let mut got = [bf16::ZERO; 64 * 64];
        c.copy_to_host(&mut got)?;
        assert_eq!(got, [bf16::from_f32(128.0); 64 * 64]);
        rank.barrier()
    });
}

/// An operation of a number of elements, with send and receive windows of at least twice that
/// number.
type Call = fn(&Rank, &Collectives, [&Window<f32>; 2], usize, &Stream) -> Result<()>;

const CALLS: [(&str, Call); 7] = [
    ("all_reduce", |_, collectives, [send, recv], n, stream| {
        collectives.all_reduce(&send.slice(..n)?, &recv.slice(..n)?, ReduceOp::Sum, stream)
    }),
    ("reduce_scatter", |_, collectives, [send, recv], n, stream| {
        collectives.reduce_scatter(&send.slice(..2 * n)?, &recv.slice(..n)?, ReduceOp::Max, stream)
    }),
    ("all_gather", |_, collectives, [send, recv], n, stream| {
        collectives.all_gather(&send.slice(..n)?, &recv.slice(..2 * n)?, stream)
    }),
    ("broadcast", |_, collectives, [send, recv], n, stream| {
        let send = send.slice(..n)?;
        collectives.broadcast(Some(send.device_slice()), &recv.slice(..n)?, 0, stream)
    }),
    ("all_to_all", |_, collectives, [send, recv], n, stream| {
        collectives.all_to_all(&send.slice(..2 * n)?, &recv.slice(..2 * n)?, stream)
    }),
    ("all_to_all_v", |_, collectives, [send, recv], n, stream| {
        let parts = Parts { counts: &[n, n], offsets: &[0, n] };
        collectives.all_to_all_v(send, parts, recv, parts, stream)
    }),
    ("product", |rank, _, _, n, stream| {
        let comm = rank.communicator()?;
        let (a, b) = (comm.mem_alloc::<bf16>(n * 8)?, comm.mem_alloc::<bf16>(16 * 8)?);
        let c = comm.window::<bf16>(n * 16)?;
        let product = GemmAllReduce::new(comm, stream, MOST, 16)?;
        product.launch(&a, &b, &c, [n, 16, 8])?;
        stream.synchronize()
    }),
];

/// The most elements of an operation.
const MOST: usize = 3000;

/// Calls an operation of different lengths. Returns whether a rank failed.
fn fails(name: &str, call: Call, lengths: [usize; 2], windows_differ: bool) -> bool {
    let world = World::builder().checked(false).simulate(Simulation::new(2)).threads(2).unwrap();
    let ran = world.run(|rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = CollectivesOptions::new().lamport_bytes(1 << 10).push_blocks(2);
        let collectives = collectives.build(comm)?;
        let n = lengths[rank.rank()];
        // The end of a window is that of its memory.
        let len = 2 * if windows_differ { n } else { MOST };
        let (send, recv) = (comm.window::<f32>(len)?, comm.window::<f32>(len)?);
        call(rank, &collectives, [&send, &recv], n, &stream)?;
        stream.synchronize()
    });
    let report = world.simulated_machine().unwrap().failure();
    // A rank that is done, or has failed, may have closed its windows.
    if let Some(Report::OutOfBounds { where_to, .. }) = report.as_deref() {
        assert!(where_to.contains("has deregistered"), "{name} of {lengths:?}: {where_to}");
    }
    ran.is_err()
}

#[test]
fn what_ranks_write_whose_counts_differ_is_within_the_windows() {
    for (name, call) in CALLS {
        let mut failed = 0;
        for lengths in [[100, 64], [8, MOST], [MOST, 8], [MOST, 2000]] {
            for windows_differ in [false, true] {
                failed += usize::from(fails(name, call, lengths, windows_differ));
            }
        }
        assert!(failed > 0, "{name}: nothing differed");
    }
}
