//! Litmus tests: small programs of one feature of PTX's memory model or of one protocol, run in
//! every order of their atomic accesses.
//!
//! A program of the memory model has a set of *outcomes*, with every old value that a weak load may
//! see. The set must contain each outcome that the model allows, except those in [`limits`], and
//! none that it forbids. A protocol must pass in every order with at most one preemption, or with
//! none, and each weakened form of it must be reported.
//!
//! `check_exhaustive` fails if it has not tried all orders, so a test that passes has tried them.

mod barrier;
mod coherence;
mod flag;
mod independent_reads;
mod lamport;
mod limits;
mod ll;
mod message_passing;
mod store_buffering;
mod tile_exchange;
mod vectors;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Mutex;

use devcomm::sim::{Change, Mutation};
use devcomm::{Kernel, Result, Simulation, check_exhaustive};
use devcomm_testing::simulated::{Gpu, read};

/// The most orders of a program.
const LIMIT: u64 = 10_000;

/// The arguments of a program of the memory model: words that are 0 at first, a result for each
/// number of the outcome, and the form of the program.
type Args = (*mut u32, *mut u32, u32);

/// Returns the outcomes of a program whose blocks have one thread each.
#[track_caller]
fn outcomes<K: Kernel<Args = Args>, const N: usize>(blocks: u32, form: u32) -> BTreeSet<[u32; N]> {
    let found = Mutex::new(BTreeSet::new());
    explore(Simulation::new(1).weak(true), |gpu| {
        let (words, results) = (gpu.buffer(&[0; 16])?, gpu.buffer(&[0; N])?);
        gpu.launch(K::with_args((&words, &results, form)).grid(blocks).block(1))?;
        let outcome: [u32; N] = read(&results)?.try_into().expect("N results");
        found.lock().unwrap().insert(outcome);
        Ok(())
    });
    found.into_inner().unwrap()
}

/// Returns every outcome of `N` numbers below `below`.
fn all<const N: usize>(below: u32) -> BTreeSet<[u32; N]> {
    let number = |code: u32, i: usize| code / below.pow(i as u32) % below;
    (0..below.pow(N as u32)).map(|code| std::array::from_fn(|i| number(code, i))).collect()
}

/// Returns every outcome but these.
fn all_but<const N: usize>(below: u32, forbidden: &[[u32; N]]) -> BTreeSet<[u32; N]> {
    all(below).into_iter().filter(|outcome| !forbidden.contains(outcome)).collect()
}

/// Runs a program in every order; returns their number.
#[track_caller]
fn explore(machine: Simulation, body: impl Fn(&Gpu<'_>) -> Result<()> + Sync) -> u64 {
    let orders = check_exhaustive(machine, LIMIT, |rank| body(&Gpu::new(rank)?));
    assert!(orders > 1, "the program has one order");
    orders
}

/// Returns the report of the first order in which a program fails.
#[track_caller]
fn report(machine: Simulation, body: impl Fn(&Gpu<'_>) -> Result<()> + Sync) -> String {
    let explored = catch_unwind(AssertUnwindSafe(|| explore(machine, body)));
    let payload = explored.map(|orders| format!("it passes in {orders} orders")).unwrap_err();
    payload.downcast_ref::<String>().expect("a message").clone()
}

/// Checks that a program with a change of the line with `text`, in the caller's file, is reported
/// as a race, or as a wrong value that it finds, at a line with one of `names`.
#[track_caller]
fn check_report(
    machine: &Simulation,
    (text, change): (&str, Change),
    names: &[&str],
    body: impl Fn(&Gpu<'_>) -> Result<()> + Sync,
) {
    let file = Location::caller().file();
    let changed = machine.clone().mutation(Mutation::new(file, line_with(file, text), change));
    let report = report(changed, body);
    let lines = names.iter().map(|name| format!("{file}:{}:", line_with(file, name)));
    let is_named = lines.into_iter().any(|at| report.contains(&at));
    let has_cause = report.contains("a race on ") || report.contains("panicked at ");
    assert!(has_cause && is_named, "{change:?} of {text}: {report}");
}

/// Returns the number of the only line before the first test of a file that contains `text`.
#[track_caller]
fn line_with(file: &str, text: &str) -> u32 {
    let source = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let kernels = source.split("#[test]").next().unwrap_or_default();
    let lines = kernels.lines().zip(1..).filter(|(line, _)| line.contains(text));
    let [only] = lines.map(|(_, number)| number).collect::<Vec<_>>()[..] else {
        panic!("{file}: not one line with {text:?}");
    };
    only
}
