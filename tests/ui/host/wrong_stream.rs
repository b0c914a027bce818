//! An operation is enqueued to a stream, or with `None` to the default stream.

use devcomm_host::{Communicator, Result, SymmetricBuffer};

fn by_its_number(comm: &Communicator, memory: &SymmetricBuffer<f32>) -> Result<()> {
    comm.send(memory, 1, None)?;
    comm.send(memory, 1, 0)
}

fn main() {}
