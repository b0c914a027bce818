//! Tests that checked worlds compare the operations that kernels do.

use devcomm::{Buffer, Collectives, Error, ReduceOp, Result, WorldError};
use devcomm_testing::machines::on_gpus;

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
        let mut unchanged = [0.0; 256];
        recv.copy_to_host(&mut unchanged)?;
        assert_eq!(unchanged, [5.0; 256]);
        send.copy_from_host(&[1.5; 128])?;
        rank.barrier()?;
        collectives.all_reduce(&from, &to, sum, &stream)?;
        stream.synchronize()?;
        recv.copy_to_host(&mut unchanged)?;
        assert_eq!(unchanged[..65], [&[3.0; 64][..], &[5.0]].concat());
        rank.barrier()
    });
}
