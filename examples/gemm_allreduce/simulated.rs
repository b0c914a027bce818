//! Both forms of the kernel on simulated GPUs.

use anyhow::{Result, ensure};
use devcomm::Tiling;
use devcomm::kernels::{self, GemmForm};
use devcomm::sim::{Buffer, DevCommConfig, LaunchConfig, Simulator};
use half::bf16;

use crate::problem::{Factor, Problem};

/// Runs a form `launches` times on the same workspace; every rank's C of each launch. With `alone` nothing is exchanged.
pub fn products(
    sim: &Simulator,
    form: GemmForm,
    problem: Problem,
    blocks: u32,
    launches: usize,
    alone: bool,
) -> Result<Vec<Vec<Vec<bf16>>>> {
    let ranks = sim.ranks();
    let Problem { m, n, k, .. } = problem;
    let factor = |factor, rank| {
        let elements = problem.factor(factor, rank);
        let buffer = sim.buffer::<bf16>(rank, elements.len())?;
        buffer.write(&elements)?;
        Ok::<Buffer<bf16>, anyhow::Error>(buffer)
    };
    let a = (0..ranks).map(|rank| factor(Factor::A, rank)).collect::<Result<Vec<_>>>()?;
    let b = (0..ranks).map(|rank| factor(Factor::B, rank)).collect::<Result<Vec<_>>>()?;
    let Some(sizes) = form.workspace(m, n, ranks) else {
        anyhow::bail!("C of {m} x {n} elements is too large to be counted");
    };
    let partials = sim.window::<f32>(sizes.partials)?;
    let flags = sim.window::<u32>(sizes.flags)?;
    let c = sim.window::<bf16>(m * n)?;
    for rank in 0..ranks {
        flags.write(rank, &vec![0; sizes.flags])?;
    }
    let comm = sim.dev_comm(DevCommConfig { lsa_barriers: blocks, ..DevCommConfig::default() })?;
    let mut config = LaunchConfig::new(blocks, form.threads());
    config.dynamic_shared = form.dynamic_shared() as usize;
    let map = |matrix: &Buffer<bf16>, rows: usize, tile_rows: usize| {
        let (rows, columns, tile_rows) = (rows as u32, k as u32, tile_rows as u32);
        Tiling { address: matrix.address(), rows, columns, tile_rows }.for_simulator()
    };
    let mut results = Vec::new();
    for _ in 0..launches {
        for rank in 0..ranks {
            c.write(rank, &vec![bf16::NAN; m * n])?;
        }
        // SAFETY: the matrices have the elements, the windows those of the workspace, and its flags were 0 before the first launch.
        unsafe {
            match form {
                GemmForm::Mma => sim.launch(kernels::gemm_allreduce_mma, config, |rank| {
                    let (c, partials, flags) =
                        (c.rank(rank), partials.rank(rank), flags.rank(rank));
                    let (m, n, k) = (m as u32, n as u32, k as u32);
                    (comm.rank(rank), &a[rank], &b[rank], c, partials, flags, m, n, k, alone)
                }),
                GemmForm::Wgmma => sim.launch(kernels::gemm_allreduce_wgmma, config, |rank| {
                    let (c, partials, flags) =
                        (c.rank(rank), partials.rank(rank), flags.rank(rank));
                    let a = map(&a[rank], m, GemmForm::TILE_ROWS);
                    let b = map(&b[rank], n, form.tile_columns());
                    let (m, n, k) = (m as u32, n as u32, k as u32);
                    (comm.rank(rank), a, b, c, partials, flags, m, n, k, alone)
                }),
            }?;
        }
        results.push((0..ranks).map(|rank| c.read(rank)).collect());
    }
    Ok(results)
}

/// Checks every element of one launch in every rank.
pub fn check(sim: &Simulator, form: GemmForm, problem: Problem, blocks: u32) -> Result<()> {
    let ranks = sim.ranks();
    for (rank, c) in products(sim, form, problem, blocks, 1, false)?.remove(0).iter().enumerate() {
        let wrong = problem.count_wrong(0..ranks, c, problem.all());
        ensure!(wrong == 0, "{form:?}, {problem:?}: rank {rank} has {wrong} wrong elements");
    }
    Ok(())
}
