//! Measures the fused product on GPUs: `cargo run --release --features ptx --example fused`.

use std::process::ExitCode;

use devcomm::{Error, Rank, World};
use half::bf16;

use {{crate_name}}::fused::FusedProduct;

/// Rows and columns of C, and the terms of each rank.
const SHAPE: [usize; 3] = [8192, 8192, 4096];
/// Timed launches, of which the mean is printed.
const LAUNCHES: usize = 50;

fn main() -> ExitCode {
    match World::from_env().and_then(|world| world.run(time)) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn time(rank: &Rank) -> Result<(), Error> {
    let [m, n, k] = SHAPE;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
    stream.fill(&a, bf16::from_f32(0.5))?;
    stream.fill(&b, bf16::from_f32(0.25))?;
    let fused = FusedProduct::new(rank, [&a, &b], SHAPE)?;
    fused.launch(&stream)?; // The first launch is not timed.
    let (begin, end) = (rank.context().event()?, rank.context().event()?);
    stream.record(&begin)?;
    for _ in 0..LAUNCHES {
        fused.launch(&stream)?;
    }
    stream.record(&end)?;
    end.synchronize()?;
    if rank.is_root() {
        let us = 1e3 * end.elapsed_ms(&begin)? / LAUNCHES as f32;
        let operations = 2.0 * (m * n * k) as f32;
        println!("{m} x {n} x {k}: {us:.1} us, {:.0} TFLOP/s a GPU", operations / us / 1e6);
    }
    Ok(())
}
