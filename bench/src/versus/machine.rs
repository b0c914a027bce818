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

    /// Does what NCCL sets up at a first call, before any is captured. *Collective*.
    fn set_up(&self, _way: &dyn Way) -> Result<()> {
        Ok(())
    }

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
                println!(
                    "# noise: the interquartile range of the rounds' times in percent of their median; time/nccl: this row's \
                     time over nccl's, median of the rounds' ratios"
                );
                println!(
                    "# kernels in Rust are compiled by the driver from PTX, those in C++ are cubins of ptxas"
                );
            }
            println!("{}", self.choice);
        }
        self.report.set_header(header);
    }

    /// Checks all ways and measures them: a row each, none without ways. *Collective*.
    pub fn compare(&mut self, case: Case, ways: &Ways<'_>) -> Result<()> {
        self.compare_refilled(case, ways, || Ok(()))
    }

    /// The same, with other inputs for what is timed than for what is checked: `refill` writes them in between.
    pub fn compare_refilled(
        &mut self,
        case: Case,
        ways: &Ways<'_>,
        refill: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if ways.is_empty() {
            return Ok(());
        }
        if self.machine.is_root() {
            eprintln!("{} B {} {} ...", case.size, case.dtype, case.shape());
        }
        // Every rank has its memory ready, flags that others write too.
        self.machine.meet()?;
        let mut ran = Vec::new();
        for way in ways {
            self.machine.set_up(way.as_ref())?;
            let wrong = self.check(way.as_ref())?;
            ran.push(Ran { variant: way.variant(), grid: way.grid(), wrong });
        }
        refill()?;
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

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use anyhow::bail;
    use clap::Parser;

    use super::*;

    const CASE: Case =
        Case { size: 4, count: 1, dtype: "f32", redop: "sum", bus: 1.0, shape: None };

    /// Two ranks' worth of a machine: the other one has as many wrong elements, and every variant takes a second longer than the one
    /// before.
    #[derive(Default)]
    struct Pretended {
        log: RefCell<Vec<&'static str>>,
    }

    impl Machine for Pretended {
        fn meet(&self) -> Result<()> {
            self.log.borrow_mut().push("meet");
            Ok(())
        }

        fn run_once(&self, work: &dyn Fn() -> Result<()>) -> Result<()> {
            work()
        }

        fn total(&self, mine: usize) -> Result<usize> {
            Ok(2 * mine)
        }

        fn time(&self, ways: &Ways<'_>, _order: &mut Shuffle) -> Result<Option<Rounds>> {
            ways.iter().try_for_each(|way| way.enqueue())?;
            let round: Vec<f64> = (0..ways.len()).map(|i| i as f64 + 1.0).collect();
            Ok(Some(vec![round; 3]))
        }

        fn is_root(&self) -> bool {
            false
        }
    }

    /// Writes its result only when it is asked to be checked, and then not always.
    struct Lazy<'a> {
        variant: Variant,
        /// Writes once in so many times.
        every: usize,
        times: Cell<usize>,
        result: Cell<u32>,
        machine: &'a Pretended,
    }

    impl Way for Lazy<'_> {
        fn variant(&self) -> Variant {
            self.variant
        }

        fn enqueue(&self) -> Result<()> {
            self.machine.log.borrow_mut().push("timed");
            Ok(())
        }

        fn spoil(&self) -> Result<()> {
            self.machine.log.borrow_mut().push("spoil");
            self.result.set(0);
            Ok(())
        }

        fn enqueue_checked(&self) -> Result<()> {
            self.machine.log.borrow_mut().push("checked");
            self.times.set(self.times.get() + 1);
            if self.times.get().is_multiple_of(self.every) {
                self.result.set(7);
            }
            Ok(())
        }

        fn count_wrong(&self) -> Result<usize> {
            Ok(usize::from(self.result.get() != 7))
        }
    }

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        run: RunOptions,
        #[command(flatten)]
        output: OutputOptions,
    }

    #[test]
    fn every_check_begins_with_a_spoilt_result_and_all_are_done_before_the_first_time() {
        let cli = Cli::parse_from(["bench", "-c", "2"]);
        let machine = Pretended::default();
        let lazy = |variant, every| {
            let (times, result) = (Cell::new(0), Cell::new(7));
            Box::new(Lazy { variant, every, times, result, machine: &machine }) as Box<dyn Way>
        };
        let choice = Choice::new(&[], &[(Variant::Rust, ""), (Variant::Nccl, "")], "test").unwrap();
        let mut job = Job::new(&machine, &cli.run, choice);
        job.compare(CASE, &vec![lazy(Variant::Rust, 1), lazy(Variant::Nccl, 2)]).unwrap();
        let checks = [["spoil", "meet", "checked"]; 4].concat();
        assert_eq!(*machine.log.borrow(), [&["meet"], &checks[..], &["timed"; 2]].concat());

        let wrong: Vec<_> = job.report.rows.iter().map(|row| row.wrong).collect();
        // One of two checks, on two ranks.
        assert_eq!(wrong, [Some(0), Some(2)]);
        assert_eq!(job.report.rows[0].time_over_nccl, Some(0.5));
        let error = job.finish(Ok(()), &cli.output).unwrap_err().to_string();
        assert_eq!(error, "2 elements are wrong, see #wrong");
    }

    #[test]
    fn the_error_of_a_run_comes_before_its_verdict() {
        let cli = Cli::parse_from(["bench"]);
        let choice = Choice::new(&[], &[(Variant::Rust, "")], "test").unwrap();
        let machine = Pretended::default();
        let job = Job::new(&machine, &cli.run, choice);
        let measured = || bail!("the GPU is on fire");
        let error = job.finish(measured(), &cli.output).unwrap_err().to_string();
        assert_eq!(error, "the GPU is on fire");
    }
}
