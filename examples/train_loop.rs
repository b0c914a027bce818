//! A training loop that continues when ranks are lost: the remaining ranks make a world of their
//! own and continue at the last step.
//!
//! ```text
//! cargo xtask run train_loop                  # a process for each GPU; rank 1 kills itself
//! DEVCOMM_SIMULATE=8 cargo xtask run train_loop --fail 5@20 --fail 0@40
//! ```

use std::process::ExitCode;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use devcomm::{
    Error, LocalJob, Rank, ReduceOp, Stream, SymmetricBuffer, World, WorldError, visible_gpus,
};

/// The weights of the model, a linear function.
const WEIGHTS: usize = 16;
/// The points to which the model is fitted; each step uses all of them.
const POINTS: usize = 512;
/// A step multiplies the error of each weight by `1 - RATE`: in the end by less than 1e-7.
const STEPS: usize = 60;
const RATE: f32 = 0.25;

#[derive(Parser)]
#[command(about = "A training loop that continues when ranks are lost")]
struct Options {
    /// RANK@STEP: this rank, of the first world, is lost at this step.
    #[arg(long, default_value = "1@20")]
    fail: Vec<Failure>,
}

/// The loss of a rank at a step.
#[derive(Clone, Copy)]
struct Failure {
    rank: usize,
    step: usize,
}

impl FromStr for Failure {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (rank, step) = text.split_once('@').context("not RANK@STEP")?;
        Ok(Self { rank: rank.parse()?, step: step.parse()? })
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let simulated = std::env::var_os("DEVCOMM_SIMULATE").is_some_and(|gpus| !gpus.is_empty());
    let ended = match World::is_launched() || simulated {
        true => run(&options, simulated),
        false => start_processes(),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a process for each GPU. When one ends, the others continue.
fn start_processes() -> Result<()> {
    Ok(LocalJob::new(visible_gpus()?)?.survive().run()?)
}

fn run(options: &Options, simulated: bool) -> Result<()> {
    let trained = AtomicBool::new(false);
    let ended = World::from_env()?.run(|rank| {
        // The first of the remaining ranks prints.
        if train(rank, options)? == 0 {
            trained.store(true, Ordering::Relaxed);
            println!("{}", if simulated { "PASS, SIMULATED" } else { "PASS" });
        }
        Ok::<_, anyhow::Error>(())
    });
    match ended {
        // This rank, a thread, was lost as intended.
        Err(error) if error.is::<Lost>() && trained.into_inner() => Ok(()),
        ended => ended.map(drop),
    }
}

/// The error of a simulated rank that is lost.
#[derive(Debug, thiserror::Error)]
#[error("this rank is lost, as --fail says")]
struct Lost;

/// The state of the training on one rank.
struct State {
    step: usize,
    weights: [f32; WEIGHTS],
    /// The gradient, on the GPU: first of this rank's points, then of all points.
    gradient: SymmetricBuffer<f32>,
    stream: Stream,
}

/// Trains to the end, with fewer ranks after each loss. Returns this rank's number in the end.
fn train(first: &Rank, options: &Options) -> Result<usize> {
    let gradient = first.communicator()?.mem_alloc(WEIGHTS)?;
    let mut state = State { step: 0, weights: [0.0; WEIGHTS], gradient, stream: first.stream()? };
    let failure = options.fail.iter().find(|failure| failure.rank == first.rank());
    let mut smaller: Option<Rank> = None;
    loop {
        let rank = smaller.as_ref().unwrap_or(first);
        let error = match train_steps(rank, &mut state, failure.map(|failure| failure.step)) {
            Ok(()) => break,
            Err(error) => error,
        };
        let Some(Error::World(WorldError::RankLost { rank: lost, .. })) = error.downcast_ref()
        else {
            return Err(error);
        };
        let lost = *lost;
        let next = rank.shrink()?;
        if next.is_root() {
            let (before, left, step) = (rank.n_ranks(), next.n_ranks(), state.step);
            println!("step {step}: rank {lost} of {before} is lost, {left} go on");
        }
        agree(&next, &mut state)?;
        smaller = Some(next);
    }
    for (weight, expected) in state.weights.iter().zip(true_weights()) {
        ensure!((weight - expected).abs() < 1e-3, "a weight is {weight}, not {expected}");
    }
    Ok(smaller.as_ref().unwrap_or(first).rank())
}

/// Gives all ranks the state of a rank that has completed the most steps: they may have been
/// interrupted in different ones.
fn agree(rank: &Rank, state: &mut State) -> Result<()> {
    let steps = rank.all_gather(&[state.step])?.concat();
    let (root, step) = steps.iter().enumerate().max_by_key(|(_, step)| **step).context("ranks")?;
    state.step = *step;
    let weights = rank.broadcast(root, &state.weights)?;
    state.weights.copy_from_slice(&weights);
    Ok(())
}

/// Trains from the state's step to the end. The rank is lost at the step `lost_at`.
fn train_steps(rank: &Rank, state: &mut State, lost_at: Option<usize>) -> Result<()> {
    let comm = rank.communicator()?;
    let State { step, weights, gradient, stream } = state;
    while *step < STEPS {
        if lost_at == Some(*step) {
            // A process is killed; a simulated rank is a thread, and returns.
            if World::is_launched() {
                std::process::abort();
            }
            bail!(Lost);
        }
        // Each rank has every n-th point.
        let mut own = [0.0; WEIGHTS];
        for point in (rank.rank()..POINTS).step_by(rank.n_ranks()) {
            let x = variables(point);
            let error = dot(weights, &x) - dot(&true_weights(), &x);
            own.iter_mut().zip(x).for_each(|(own, x)| *own += error * x);
        }
        gradient.copy_from_host(&own)?;
        comm.all_reduce(gradient, gradient, ReduceOp::Sum, &*stream)?;
        stream.copy_to_host(gradient, &mut own)?;
        weights.iter_mut().zip(own).for_each(|(weight, sum)| *weight -= RATE * sum / POINTS as f32);
        *step += 1;
    }
    Ok(())
}

fn dot(a: &[f32; WEIGHTS], b: &[f32; WEIGHTS]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn true_weights() -> [f32; WEIGHTS] {
    std::array::from_fn(|index| index as f32 / 4.0 - 2.0)
}

/// Returns a point's variables: each is 1 or -1, and they are uncorrelated over all points.
fn variables(point: usize) -> [f32; WEIGHTS] {
    // The points are rows of a Hadamard matrix.
    std::array::from_fn(
        |index| if (point & index).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 },
    )
}
