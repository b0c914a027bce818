//! One rank's run of a benchmark: checks every contender (a variant's implementation), then times
//! them interleaved.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use devcomm::{KernelSet, Kernels};

use crate::base::{OutputOptions, Spread, TwinFiles};
use crate::contenders::peers;
use crate::contenders::{Contender, Contest, PeerResult, Role, Selection, Variant};
use crate::harness::header::Header;
use crate::harness::sensors::Reading;
use crate::harness::{Harness, Nccl, Rounds};
use crate::report::nccl_tests;
use crate::report::ratio::Summary;
use crate::report::row::{self, Case, Row, add_times};
use crate::report::table::Report;

/// One rank's run of a benchmark.
pub struct Job<'a> {
    pub harness: &'a Harness<'a>,
    pub selection: Selection,
    contest: &'static Contest,
    /// The folder of the C++ kernels, if given.
    pub twins: Option<&'a Path>,
    output: &'a OutputOptions,
    /// Results of other programs.
    by_peers: &'a [PeerResult],
    /// The indices of those that belong to a case.
    joined: BTreeSet<usize>,
    /// The program of nccl-tests whose table is printed instead, and variants also run in place.
    nccl_tests: Option<&'static str>,
    order: fastrand::Rng,
    report: Report<Row>,
}

impl<'a> Job<'a> {
    /// Returns a job without rows, which adds `by_peers` to the cases that they belong to. With a
    /// program of nccl-tests it runs variants in place too, and prints the table of the program.
    pub fn new(
        harness: &'a Harness<'a>,
        selection: Selection,
        contest: &'static Contest,
        (twins, output): (Option<&'a Path>, &'a OutputOptions),
        (by_peers, nccl_tests): (&'a [PeerResult], Option<&'static str>),
    ) -> Self {
        Self {
            harness,
            selection,
            contest,
            twins,
            output,
            by_peers,
            joined: BTreeSet::new(),
            nccl_tests,
            order: fastrand::Rng::with_seed(harness.run.seed),
            report: Report::new(),
        }
    }

    /// Returns where the variants run: out of place, and perhaps in place.
    pub fn places(&self) -> &'static [bool] {
        let both = self.nccl_tests.is_some() || self.harness.run.in_place;
        if both { &[false, true] } else { &[false] }
    }

    /// Returns the configurations of NCCL; one for nccl-tests' table. *Collective*.
    pub fn nccl(&self) -> Result<Vec<Nccl<'a>>> {
        let mut all = self.harness.nccl()?;
        all.truncate(if self.nccl_tests.is_some() { 1 } else { all.len() });
        Ok(all)
    }

    /// Loads `set` for `rust`, and for `cpp` the C++ module `name` if there is one; variants that
    /// are not selected are left out.
    pub fn kernels(&mut self, set: &KernelSet, name: &str) -> Result<Vec<(Variant, Kernels)>> {
        let rank = self.harness.rank;
        let mut kernels = Vec::new();
        if self.selection.has(Variant::Rust) {
            kernels.push((Variant::Rust, Kernels::load(rank.context(), set)?));
        }
        let twin = || {
            ensure!(!rank.is_simulated(), "the simulator runs only kernels in Rust");
            let files = TwinFiles::find(self.twins)?;
            let module = files.cpp(&[name]).into_iter().find(|module| module.is_file());
            module.with_context(|| format!("{} has no {name} in C++", files.folder().display()))
        };
        if self.selection.has(Variant::Cpp) {
            match twin() {
                Ok(module) => {
                    // SAFETY: `cargo xtask twins` compiled kernels with these parameters.
                    let twin = unsafe { Kernels::load_files(rank.context(), &[module]) };
                    kernels.push((Variant::Cpp, twin.context("the C++ twin does not load")?));
                }
                Err(why) => self.selection.omit(Variant::Cpp, why)?,
            }
        }
        Ok(kernels)
    }

    /// Prints the header, once the variants are known.
    pub fn begin(&mut self) -> Result<()> {
        let header = Header::of(self.harness.rank)?;
        if self.harness.rank.is_root() {
            print!("{header}");
            if header.machine.is_some() {
                println!("# {}", self.harness.run.describe());
                println!(
                    "# noise: the interquartile range of the rounds' times in percent of their \
                     median; spread: the longest minus the shortest, likewise; p99: their 99th \
                     percentile, of batches, in which a slow call is one of many; time/best: this \
                     row's time over that of the fastest competitor, median of the rounds"
                );
                if !self.by_peers.is_empty() {
                    println!("# the rounds of other programs were not those of this one");
                }
            }
            println!("{}", self.selection);
            if self.nccl_tests.is_some() {
                println!("{}", nccl_tests::head());
            }
        }
        self.report.begin(header);
        Ok(())
    }

    /// Checks and times all contenders: one row each. *Collective*.
    pub fn compare(&mut self, case: Case, contenders: &[Contender<'_>]) -> Result<()> {
        self.compare_refilled(case, contenders, || Ok(()))
    }

    /// Does the same as [`compare`](Self::compare); `refill` writes other inputs after the checks,
    /// for timing.
    pub fn compare_refilled(
        &mut self,
        case: Case,
        contenders: &[Contender<'_>],
        refill: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if contenders.is_empty() && !self.by_peers.iter().any(|result| case.has(result)) {
            return Ok(());
        }
        self.harness.progress(&format!("{} B {} {} ...", case.size, case.dtype, case.shape()));
        let wrong = self.harness.check(contenders)?;
        let (mut rounds, mut between) = (None, None);
        let mut readings = vec![Reading::default(); contenders.len()];
        if self.harness.is_timed {
            refill()?;
            let (harness, order, n) = (self.harness, &mut self.order, self.harness.run.rounds);
            let (times, read) = harness.time(contenders, order, n)?;
            (rounds, readings) = (Some(times), read);
            between = harness.time_between(contenders, order, n)?;
        }
        let results = contenders.iter().zip(wrong).zip(readings).enumerate();
        let row = |(i, ((c, wrong), reading)): (usize, ((&Contender<'_>, _), Reading))| {
            let between = Spread::of(between.iter().flatten().map(|round| round[i]));
            let Reading { power_w, sm_mhz, temperature_c } = reading;
            Row {
                in_place: c.in_place,
                blocks: c.launch.map(|launch| launch.blocks),
                threads: c.launch.map(|launch| launch.threads),
                algorithm: c.description(),
                asked: c.asked.clone(),
                wrong,
                between_us: between.map(|time| time.median * 1e6),
                between_noise_percent: between.map(|time| time.iqr / time.median.abs() * 100.0),
                power_w,
                sm_mhz,
                temperature_c,
                ..case.row(c.variant)
            }
        };
        let mut rows: Vec<Row> = results.map(row).collect();
        self.join_peers(&case, &mut rows, rounds.as_mut());
        let output = self.harness.rank.is_root().then_some(self.output);
        add_times(&mut rows, case.bus, &self.contest.with(Role::Theirs), rounds.as_ref());
        let nccl_tests = self.nccl_tests.map(|program| nccl_tests::lines(program, &rows));
        let as_peer = std::env::var(peers::AS_PEER).ok();
        let as_peer = as_peer.map(|name| row::lines_of_peer(&name, &rows, rounds.as_ref()));
        let lines = self.report.add(rows, output)?;
        if self.harness.rank.is_root() {
            println!("{}", as_peer.or(nccl_tests).unwrap_or(lines));
        }
        Ok(())
    }

    /// Adds the peers' results of a case to its rows and rounds.
    fn join_peers(&mut self, case: &Case, rows: &mut Vec<Row>, mut rounds: Option<&mut Rounds>) {
        for (i, result) in self.by_peers.iter().enumerate().filter(|(_, peer)| case.has(peer)) {
            self.joined.insert(i);
            let PeerResult { variant, wrong, ref algorithm, ref times_us, .. } = *result;
            // In `asked` the algorithm tells a peer's rows apart when its second run joins them.
            let (algorithm, asked) = (algorithm.clone(), algorithm.clone());
            rows.push(Row { wrong, algorithm, asked, ..case.row(variant) });
            for (round, us) in rounds.iter_mut().flat_map(|rounds| rounds.iter_mut()).zip(times_us)
            {
                round.push(us / 1e6);
            }
        }
    }

    /// Prints the summary of the rows, also if `measured` is an error. No rows and wrong results
    /// are an error. Leaves the root rank's report in `timed_report`, if its rows have times.
    pub fn finish(
        mut self,
        measured: Result<()>,
        timed_report: &Mutex<Option<Report<Row>>>,
    ) -> Result<()> {
        let summary = Summary::of(self.contest, &self.report.rows);
        if self.harness.rank.is_root() {
            let left = self.by_peers.iter().enumerate().filter(|(i, _)| !self.joined.contains(i));
            for (_, result) in left.filter(|_| measured.is_ok()) {
                result.leave_out("this run has no such case");
            }
            match self.nccl_tests {
                Some(program) => println!("{}", nccl_tests::foot(program, &self.report.rows)),
                None if self.report.rows.is_empty() => {}
                None => println!("\n{summary}"),
            }
        }
        measured?;
        ensure!(!self.report.rows.is_empty(), "no variant runs: name others, or other cases");
        self.report.finish(self.harness.rank.is_root().then_some(self.output))?;
        summary.judge()?;
        let is_kept = self.harness.rank.is_root() && self.harness.is_timed;
        if let Some(mut timed_report) = timed_report.lock().ok().filter(|_| is_kept) {
            *timed_report = Some(self.report);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use anyhow::bail;
    use clap::Args;
    use devcomm::World;

    use super::*;
    use crate::base::options::{RankOptions, RunOptions, parse};
    use crate::contenders::contender::Outcome;
    use crate::contenders::contest::VariantInfo;

    const CASE: Case = Case { size: 4, count: 1, dtype: "f32", redop: "sum", ..Case::NONE };

    /// The calls of a rank's contenders.
    struct Log<'a> {
        done: RefCell<Vec<&'static str>>,
        /// The number of poisoned results of both ranks.
        poisoned: &'a AtomicUsize,
    }

    /// A result that is right if it is 7.
    struct Seven<'a>(Rc<Cell<u32>>, &'a Log<'a>);

    impl Outcome for Seven<'_> {
        fn poison(&self) -> Result<()> {
            self.1.done.borrow_mut().push("poison");
            self.1.poisoned.fetch_add(1, Ordering::Relaxed);
            self.0.set(0);
            Ok(())
        }

        fn count_wrong(&self) -> Result<usize> {
            Ok(usize::from(self.0.get() != 7))
        }
    }

    /// Returns a contender that writes its result only in every `every`th check.
    fn lazy<'a>(variant: Variant, every: usize, log: &'a Log<'a>) -> Contender<'a> {
        let (result, times) = (Rc::new(Cell::new(7)), Cell::new(0_usize));
        let outcome = Seven(Rc::clone(&result), log);
        let checked = move || {
            let mine = log.done.borrow().iter().filter(|done| **done == "poison").count();
            let all = log.poisoned.load(Ordering::Relaxed);
            assert!(all >= 2 * mine, "the other rank's result is not poisoned yet");
            log.done.borrow_mut().push("checked");
            times.set(times.get() + 1);
            if times.get().is_multiple_of(every) {
                result.set(7);
            }
            Ok(())
        };
        let timed = || {
            log.done.borrow_mut().push("timed");
            Ok(())
        };
        Contender::new(variant, checked, outcome).timed(1, timed)
    }

    #[derive(Args)]
    struct Flags {
        #[command(flatten)]
        ranks: RankOptions,
        #[command(flatten)]
        run: RunOptions,
        #[command(flatten)]
        output: OutputOptions,
    }

    /// Runs `test` with a job of two simulated ranks.
    fn simulated(args: &str, test: impl Fn(Job<'_>, &Log<'_>) -> Result<()> + Sync) {
        simulated_with(args, &[], test);
    }

    fn simulated_with(
        args: &str,
        by_peers: &[PeerResult],
        test: impl Fn(Job<'_>, &Log<'_>) -> Result<()> + Sync,
    ) {
        let poisoned = AtomicUsize::new(0);
        let cli: Flags = parse(args);
        let variants =
            [Variant::Rust, Variant::Nccl].map(|variant| VariantInfo::column(variant, ""));
        let selection = Selection::new(&[], &variants, "test").unwrap();
        let ran = World::simulated(2).unwrap().run(|rank| {
            let mut harness = Harness::new(rank, &cli.ranks, &cli.run)?;
            // The times are meaningless, but taken as on GPUs.
            harness.is_timed = true;
            let contest = Contest::of("gemm-allreduce").unwrap();
            let (files, others) = ((None, &cli.output), (by_peers, None));
            let log = Log { done: RefCell::default(), poisoned: &poisoned };
            test(Job::new(&harness, selection.clone(), contest, files, others), &log)
        });
        ran.unwrap();
    }

    #[test]
    fn every_check_begins_with_a_spoilt_result_and_all_are_done_before_the_first_time() {
        simulated("-c 2 -n 3 -w 1 --rounds 2", |mut job, log| {
            job.compare(CASE, &[lazy(Variant::Rust, 1, log), lazy(Variant::Nccl, 2, log)])?;
            // Each contender has the warm-up, and in both rounds an untimed launch and the batch.
            let timed = 2 * (1 + 2 * (1 + 3));
            let checks = [["poison", "checked"]; 4].concat();
            assert_eq!(*log.done.borrow(), [&checks[..], &vec!["timed"; timed]].concat());

            let wrong: Vec<_> = job.report.rows.iter().map(|row| row.wrong).collect();
            // `nccl` writes its result in one of two checks, on both ranks.
            assert_eq!(wrong, [Some(0), Some(2)]);
            assert!(job.report.rows.iter().all(|row| row.time_us.is_some()));
            let error = job.finish(Ok(()), &Mutex::default()).unwrap_err().to_string();
            assert_eq!(error, "2 elements are wrong, see #wrong");
            Ok(())
        });
    }

    #[test]
    fn the_results_of_others_join_the_cases_that_they_belong_to() {
        let result = |variant, dtype: &str, wrong| {
            let times_us = vec![2.0, 4.0, 3.0];
            PeerResult { times_us, wrong: Some(wrong), ..PeerResult::new(variant, dtype, 4) }
        };
        let torch = [(Variant::TorchOneShot, "f32", 5), (Variant::TorchTwoShot, "bf16", 0)];
        let by_peers = torch.map(|(variant, dtype, wrong)| result(variant, dtype, wrong));
        simulated_with("-n 1 -w 0 --rounds 3", &by_peers, |mut job, log| {
            job.compare(CASE, &[lazy(Variant::Rust, 1, log)])?;
            let [rust, torch] = &job.report.rows[..] else { panic!("{:?}", job.report.rows) };
            assert_eq!((torch.variant, torch.wrong), (Variant::TorchOneShot, Some(5)));
            assert!((torch.time_us.unwrap() - 3.0).abs() < 1e-9, "{torch:?}");
            assert!(rust.time_over_best.is_some() && torch.time_over_best == Some(1.0));
            // A case without a variant of this program has the rows of others.
            job.compare(Case { dtype: "bf16", ..CASE }, &[])?;
            assert!((job.report.rows[2].time_us.unwrap() - 3.0).abs() < 1e-9);
            job.compare(Case { dtype: "f16", ..CASE }, &[])?;
            assert_eq!(job.report.rows.len(), 3);
            assert!(job.finish(Ok(()), &Mutex::default()).is_err());
            Ok(())
        });
    }

    #[test]
    fn rows_are_in_the_file_before_the_run_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.json");
        simulated(&format!("-n 1 -w 0 --rounds 1 --json {}", path.display()), |mut job, log| {
            for rows in 1..3 {
                job.compare(CASE, &[lazy(Variant::Rust, 1, log)])?;
                if job.harness.rank.is_root() {
                    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
                    assert_eq!(file["rows"].as_array().map(Vec::len), Some(rows));
                }
            }
            Ok(())
        });
    }

    #[test]
    fn a_row_has_the_time_after_a_kernel_of_another_program() {
        for args in ["-n 2 -w 0 --rounds 3 --between", "-n 2 -w 0 --rounds 3"] {
            simulated(args, |mut job, log| {
                job.compare(CASE, &[lazy(Variant::Rust, 1, log)])?;
                let timed = log.done.borrow().iter().filter(|done| **done == "timed").count();
                let is_between = args.ends_with("--between");
                assert_eq!(timed, if is_between { 18 } else { 9 });
                assert_eq!(job.report.rows[0].between_us.is_some(), is_between);
                Ok(())
            });
        }
    }

    #[test]
    fn a_run_without_a_row_is_an_error() {
        simulated("", |mut job, _| {
            job.compare(CASE, &[])?;
            let error = job.finish(Ok(()), &Mutex::default()).unwrap_err().to_string();
            assert!(error.starts_with("no variant runs"), "{error}");
            Ok(())
        });
    }

    #[test]
    fn the_error_of_a_run_comes_before_its_verdict() {
        simulated("", |job, _| {
            let measured = || bail!("a launch failed");
            let error = job.finish(measured(), &Mutex::default()).unwrap_err().to_string();
            assert_eq!(error, "a launch failed");
            Ok(())
        });
    }
}
