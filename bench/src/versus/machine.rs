//! What a comparison runs on, and the comparison itself: every variant is checked, then all are timed in turns.

use anyhow::Result;

use super::row::{Case, Ran, Rounds, Row, Summary, rows};
use super::variant::{Choice, Variant};
use crate::header::Header;
use crate::options::{OutputOptions, RunOptions};
use crate::stats::Shuffle;
use crate::table::Report;

/// One variant of a case, with the memory that it works on. What it enqueues is the same in every rank.
pub trait Way {
    /// Whose way it is.
    fn variant(&self) -> Variant;

    /// Blocks and threads; `None` where NCCL chooses them.
    fn grid(&self) -> Option<(u32, u32)> {
        None
    }

    /// Enqueues what is timed.
    fn enqueue(&self) -> Result<()>;

    /// Operations in what is timed: a row tells the time of one.
    fn operations(&self) -> u32 {
        1
    }

    /// Spoils the result, so that what is not written is wrong.
    fn spoil(&self) -> Result<()>;

    /// Enqueues what is checked.
    fn enqueue_checked(&self) -> Result<()> {
        self.enqueue()
    }

    /// Wrong elements of the result, in this rank, or in all that are simulated. *Collective*.
    fn count_wrong(&self) -> Result<usize>;
}

/// Boxed, since each benchmark has its own.
pub type Ways<'a> = Vec<Box<dyn Way + 'a>>;

/// GPUs, seen from one of their ranks, or the simulator.
pub trait Machine {
    /// Waits until every rank is here. *Collective*.
    fn meet(&self) -> Result<()>;

    /// Does the work once, in the form that is timed, and waits for it.
    fn run_once(&self, work: &dyn Fn() -> Result<()>) -> Result<()>;

    /// The sum over all ranks. *Collective*.
    fn total(&self, mine: usize) -> Result<usize>;

    /// The times of every way in each round; `None` where they mean nothing. *Collective*.
    fn time(&self, ways: &Ways<'_>, order: &mut Shuffle) -> Result<Option<Rounds>>;

    /// Whether it prints.
    fn is_root(&self) -> bool;
}

/// A run of a benchmark.
pub struct Job<'a, M> {
    pub machine: &'a M,
    pub run: &'a RunOptions,
    pub choice: Choice,
    order: Shuffle,
    report: Report<Row>,
}

impl<'a, M: Machine> Job<'a, M> {
    /// Without rows yet.
    pub fn new(machine: &'a M, run: &'a RunOptions, choice: Choice) -> Self {
        Self { machine, run, choice, order: Shuffle::new(run.seed), report: Report::new() }
    }

    /// Prints what is measured on and how.
    pub fn begin(&mut self, header: Header) {
        if self.machine.is_root() {
            header.print();
            if header.machine.is_some() {
                println!("# {}", self.run.describe());
            }
            println!("{}", self.choice);
        }
        self.report.set_header(header);
    }

    /// Checks all ways and measures them: a row each. *Collective*.
    pub fn compare(&mut self, case: Case, ways: &Ways<'_>) -> Result<()> {
        if self.machine.is_root() {
            eprintln!("{} B {} ...", case.size, case.dtype);
        }
        let mut ran = Vec::new();
        for way in ways {
            let wrong = self.check(way.as_ref())?;
            ran.push(Ran { variant: way.variant(), grid: way.grid(), wrong });
        }
        let rounds = self.machine.time(ways, &mut self.order)?;
        self.report.rows.extend(rows(case, &ran, rounds.as_ref()));
        Ok(())
    }

    /// Wrong elements over all ranks and checks; `None` when nothing is to be checked. *Collective*.
    fn check(&self, way: &dyn Way) -> Result<Option<usize>> {
        let mut wrong = None;
        for _ in 0..self.run.check {
            way.spoil()?;
            // No rank's result may come before another's was spoilt.
            self.machine.meet()?;
            self.machine.run_once(&|| way.enqueue_checked())?;
            let mine = way.count_wrong()?;
            wrong = Some(wrong.unwrap_or(0) + self.machine.total(mine)?);
        }
        Ok(wrong)
    }

    /// Prints what was measured, also when that is not all, and gives the verdict.
    pub fn finish(self, measured: Result<()>, output: &OutputOptions) -> Result<()> {
        let summary = Summary::of(&self.report.rows);
        if self.machine.is_root() && !self.report.rows.is_empty() {
            println!("{}\n", self.report.table());
            println!("{summary}");
            self.report.write(output)?;
        }
        measured?;
        summary.judge()
    }
}
