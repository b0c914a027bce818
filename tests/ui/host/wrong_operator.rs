//! A custom operator is for one type; other numbers are no operators.

use devcomm_host::{Communicator, CustomReduceOp, Result, Stream, SymmetricBuffer};

fn buffers_of_another_type(
    comm: &Communicator,
    memory: &SymmetricBuffer<f32>,
    op: &CustomReduceOp<f64>,
    stream: &Stream,
) -> Result<()> {
    comm.all_reduce(memory, memory, op, stream)
}

fn by_its_number(
    comm: &Communicator,
    memory: &SymmetricBuffer<f32>,
    stream: &Stream,
) -> Result<()> {
    comm.all_reduce(memory, memory, 2, stream)
}

fn main() {}
