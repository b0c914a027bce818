//! The fastest plans of `devcomm::Collectives`, and the tables that keep them.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::bail;
use devcomm::{Buffer, CollectivePlan, Collectives, Element, Rank};
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::collectives::for_types;
use super::operation::{Call, CollectiveLibrary, Operation};
use super::prelude::*;
use super::tune::{Timed, choose, print_header, print_times, run_off};
use super::tune_table::{Table, TableKey, number};
use crate::base::options::{Dtype, LARGEST, RankOptions, RunOptions};
use crate::base::{date, ranks, validate_output};

/// The flags of `tune all-reduce` and so on. Its output can be used as a table: lines that are not
/// entries are comments.
#[derive(Args, Clone, Debug)]
pub struct TuneCollective {
    #[command(flatten)]
    sizes: SizeOptions,

    /// Element type of a reduction
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "f32")]
    dtype: Dtype,

    /// Also write the fastest plans to this table, which keeps its comments and other entries
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,

    #[command(flatten)]
    ranks: RankOptions,

    #[command(flatten)]
    run: RunOptions,
}

/// The key of an entry: operation, ranks, type, and the bytes of a message.
type Key = (String, usize, String, usize);

impl TableKey for Key {
    fn parse(words: &[&str]) -> Result<Self> {
        let [operation, ranks, dtype, bytes, plan] = *words else {
            bail!("it is not `operation ranks type bytes plan`")
        };
        plan.parse::<CollectivePlan>()?;
        Ok((operation.to_owned(), number(ranks)?, dtype.to_owned(), number(bytes)?))
    }
}

impl TuneCollective {
    /// Times the plans of every size.
    pub fn run(&self, operation: Operation) -> Result<()> {
        self.run.validate_for_plans()?;
        self.sizes.validate()?;
        if operation.reduces() {
            self.dtype.require_float("tune")?;
        }
        // A file that is not a table, or cannot be written, is an error before any measurement.
        self.table.as_deref().map(Table::<Key>::read).transpose()?;
        validate_output("--table", self.table.as_deref())?;
        ranks::run(&self.ranks, None, |rank| {
            ensure!(!rank.is_simulated(), "simulated GPUs have no times: tune runs on GPUs");
            let harness = Harness::new(rank, &self.ranks, &self.run)?;
            print_header(&harness)?;
            self.run_types(&harness, operation)
        })
    }

    fn run_types(&self, harness: &Harness<'_>, operation: Operation) -> Result<()> {
        let collectives = harness.collectives().build(harness.comm)?;
        // Tables name the type `u8` where the time depends on the bytes alone.
        if !operation.reduces() {
            return self.run_type::<f32>(harness, operation, &collectives, "u8");
        }
        for_types!(self.dtype, T in [f32, f16, bf16] => {
            self.run_type::<T>(harness, operation, &collectives, T::NAME)?;
        });
        Ok(())
    }

    fn run_type<T: Number>(
        &self,
        harness: &Harness<'_>,
        operation: Operation,
        collectives: &Collectives,
        dtype: &str,
    ) -> Result<()> {
        let (rank, ranks) = (harness.rank, harness.rank.n_ranks());
        let [to_send, to_receive] = operation.chunks(ranks);
        let chunks = to_send.max(to_receive);
        let mut order = fastrand::Rng::with_seed(self.run.seed);
        let counts = self.sizes.counts(LARGEST, chunks * size_of::<T>())?;
        // The buffers are allocated once for all sizes: NCCL registers the buffers of its calls in
        // graphs, and had wrong results in memory that was freed and allocated again.
        let most = counts.iter().copied().max().unwrap_or(0);
        let send = harness.comm.window::<T>(to_send * most)?;
        let recv = harness.comm.window::<T>(to_receive * most)?;
        for count in counts {
            let bytes = count * size_of::<T>();
            let (name, largest) = (operation.name(), chunks * bytes);
            harness.progress(&format!("{name} of {largest} B ..."));
            let buffers = [send.slice(..to_send * count)?, recv.slice(..to_receive * count)?];
            let call = Call::new(harness, operation, false, buffers)?;
            let [all, finals] = time(harness, collectives, &call, &mut order)?;
            let Timed { plan, seconds, .. } = choose(&finals).context("there is no plan")?;
            if !rank.is_root() {
                continue;
            }
            print_times(&format!("{name} of {bytes} B {dtype}"), &all, &finals);
            let (us, today) = (seconds * 1e6, date(SystemTime::now()));
            let line = format!("{name} {ranks} {dtype} {bytes} {plan} # {us:.2} us, {today}");
            let key: Key = (name.to_owned(), ranks, dtype.to_owned(), bytes);
            Table::record(self.table.as_deref(), key, line, head(rank)?)?;
        }
        Ok(())
    }
}

/// Returns the first line of a table.
fn head(rank: &Rank) -> Result<String> {
    let gpu = rank.context().device_name()?;
    Ok(format!(
        "# Plans of collectives on an {gpu}: operation ranks type bytes plan. Written by \
         `devcomm-bench tune`."
    ))
}

/// Returns the times of all plans of a call, and those of the fastest few, which are measured again
/// ([`run_off`]). *Collective*.
fn time<T: Number>(
    harness: &Harness<'_>,
    collectives: &Collectives,
    call: &Call<'_, T>,
    order: &mut fastrand::Rng,
) -> Result<[Vec<Timed<CollectivePlan>>; 2]> {
    let plans = call.ask(|call| collectives.plans(call))?;
    let current = &Cell::new(None);
    let contender = |&plan: &CollectivePlan| {
        let work = move || {
            if current.replace(Some(plan)) != Some(plan) {
                collectives.set_plan(Some(plan));
            }
            call.launch(CollectiveLibrary::Devcomm(collectives))
        };
        Contender::new(Variant::RustOps, work, call.clone())
    };
    let timed = run_off(harness, &plans, contender, || Ok(()), order);
    collectives.set_plan(None);
    timed
}

#[cfg(test)]
mod tests {
    use devcomm::{Algorithm, World};

    use super::*;
    use crate::base::options::parse;

    #[test]
    fn every_plan_is_checked_and_timed() {
        let tune: TuneCollective = parse("-n 2 --rounds 3");
        let ran = World::simulated(2).unwrap().run(|rank| {
            // The times are meaningless, but taken as on GPUs.
            let harness = Harness::new(rank, &tune.ranks, &tune.run)?;
            let collectives = Collectives::new(harness.comm)?;
            for operation in [Operation::AllReduce, Operation::Broadcast] {
                // These buffers are not in windows, so only Lamport messages and NCCL can do it.
                let memory = || harness.comm.mem_alloc::<f32>(100);
                let (send, recv) = (memory()?.device_slice(), memory()?.device_slice());
                let call = Call::new(&harness, operation, false, [send, recv])?;
                let mut order = fastrand::Rng::with_seed(1);
                let [all, finals] = time(&harness, &collectives, &call, &mut order)?;
                let algorithms: Vec<_> = all.iter().map(|timed| timed.plan.algorithm).collect();
                assert_eq!(algorithms[0], Algorithm::Lamport);
                assert_eq!(algorithms[1..], [Algorithm::Nccl]);
                assert!(choose(&finals).is_some());
            }
            anyhow::Ok(())
        });
        ran.unwrap();
    }

    #[test]
    fn lines_of_a_table_are_its_entries() {
        let key = |line: &str| Key::parse(&line.split(' ').collect::<Vec<_>>());
        let parsed = key("all-reduce 2 f32 64 lamport:1x64").unwrap();
        assert_eq!(parsed, ("all-reduce".to_owned(), 2, "f32".to_owned(), 64));
        assert!(key("all-reduce 2 f32 lamport:1x64").is_err());
        assert!(key("all-reduce 2 f32 64 ring").is_err());
    }
}
