//! What a collective sends and what it receives have one type.

use devcomm_host::{Communicator, ReduceOp, Result, Stream, SymmetricBuffer};

fn mixed(
    comm: &Communicator,
    send: &SymmetricBuffer<f32>,
    recv: &SymmetricBuffer<f64>,
    stream: &Stream,
) -> Result<()> {
    comm.all_reduce(send, recv, ReduceOp::Sum, stream)
}

fn main() {}
