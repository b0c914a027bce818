//! Mutants: planted bugs in the kernels, each of which the simulator must find.
//!
//! A mutant changes one line of a kernel: a barrier is removed, an order weakened, a scope
//! narrowed, a wait left out. The simulator makes the change where the kernel calls it, so that one
//! build serves all. A mutant is caught if in some schedule the simulator reports an error that
//! names the right line; the originals must pass in every schedule.
//!
//! `cargo xtask mutants` runs it. If `DEVCOMM_MUTANTS` names a program, only its mutants run.
//! `DEVCOMM_SCHEDULES` is the number of schedules, or a range of them, such as `1000..2000`.
//! Originals that take long run in fewer schedules, unless `DEVCOMM_ORIGINALS` is `all`.

mod programs;
mod table;

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;

use devcomm::sim::{Change, Error, Lag, Mutation, Simulation};
use devcomm_testing::simulated::{run, world};

use self::programs::Program;
use self::table::MUTANTS;

/// A planted bug.
struct Mutant {
    /// The program that has it.
    pub program: &'static str,
    file: &'static str,
    /// The text of the changed line, and its index among the lines of the file with this text.
    line: (&'static str, usize),
    change: Change,
    /// Texts: the report must name a line that contains one of them.
    names: &'static [&'static str],
}

/// Returns the numbers, from 1, of the lines that contain `text`.
fn lines_with(file: &str, text: &str) -> Vec<u32> {
    let path = format!("{}/{file}", env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let lines = source.lines().zip(1..).filter(|(line, _)| line.contains(text));
    lines.map(|(_, number)| number).collect()
}

impl Mutant {
    fn mutation(&self) -> Mutation {
        let (text, index) = self.line;
        let lines = lines_with(self.file, text);
        let line = lines.get(index).unwrap_or_else(|| {
            panic!("{}: {} lines with {text:?}, not {}", self.file, lines.len(), index + 1)
        });
        Mutation::new(file_name(self.file), *line, self.change)
    }

    /// Returns whether a report names one of the right lines.
    fn is_named_by(&self, report: &str) -> bool {
        // A bug in shared code is reported at a line of a kernel that calls it.
        let kernels: &[&str] = match self.file {
            table::MAINLOOP | table::WARPGROUP => &table::USERS_OF_MAINLOOP,
            table::SWAPPED => &[table::SWAPPED_TILES, table::SWAPPED_STORES],
            table::EP_DISPATCH | table::EP_DISPATCH_PARTS => {
                &[table::EP_DISPATCH, table::EP_DISPATCH_PARTS]
            }
            table::EP_COMBINE | table::EP_COMBINE_PARTS => {
                &[table::EP_COMBINE, table::EP_COMBINE_PARTS]
            }
            table::FUSED => &[table::OWNER],
            table::STORES => &[table::LAST_ROWS],
            table::LAST_ROWS => &[table::STORES, table::GUIDE_WIDE],
            table::ONE_STEP => &table::USERS_OF_ONE_STEP,
            table::DISPATCH_TEAMS => &[table::EP_RAIL],
            _ => &[],
        };
        let files: Vec<&str> = [self.file].into_iter().chain(kernels.iter().copied()).collect();
        self.names.iter().any(|text| {
            let places = files.iter().flat_map(|file| {
                lines_with(file, text)
                    .into_iter()
                    .map(|line| format!("{}:{line}:", file_name(file)))
            });
            let places: Vec<String> = places.collect();
            assert!(!places.is_empty(), "{files:?}: no line with {text:?}");
            places.iter().any(|place| report.contains(place))
        })
    }
}

/// Returns the last part of a path, as in reports.
fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns the schedules of these numbers; number 0 is the fixed order.
fn schedules(program: &Program, numbers: Range<u64>) -> impl Iterator<Item = Simulation> {
    let machine = (program.machine)();
    numbers.map(move |seed| {
        let machine = machine.clone();
        if seed == 0 {
            return machine;
        }
        let machine = machine.seed(seed).weak(seed % 2 == 0);
        match seed % 6 {
            1 => machine.lag(Lag::Rank),
            2 => machine.lag(Lag::Block),
            3 => machine.lag(Lag::Warp),
            4 => machine.preempt(true),
            5 => machine.pct(3).preempt(false),
            _ => machine,
        }
    })
}

/// Returns the error that the simulator finds in one run.
fn failure(program: &Program, simulation: Simulation) -> Option<Arc<Error>> {
    // A mutant that runs for ever ends far beyond the steps of any original.
    let world = world(simulation.step_limit(200_000_000));
    let ran = run(&world, |gpu| (program.body)(gpu));
    let failure = world.simulated_machine().and_then(devcomm::sim::Machine::failure);
    assert!(ran.is_ok() || failure.is_some(), "{}: {ran:?}", program.name);
    failure
}

/// Returns the numbers of the schedules: those of `DEVCOMM_SCHEDULES`, or the first 100.
fn numbers() -> Range<u64> {
    let Ok(text) = std::env::var("DEVCOMM_SCHEDULES") else { return 0..100 };
    let (first, end) = text.split_once("..").unwrap_or(("0", &text));
    let number = |text: &str| {
        text.parse().unwrap_or_else(|_| panic!("DEVCOMM_SCHEDULES is {text:?}, not a number"))
    };
    number(first)..number(end)
}

/// Calls `work` with each item, on all cores.
fn on_all_cores<T>(items: impl Iterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let items = Mutex::new(items);
    let next = || items.lock().unwrap().next();
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| std::iter::from_fn(next).for_each(&work));
        }
    });
}

#[test]
fn every_mutant_is_caught() {
    let only = std::env::var("DEVCOMM_MUTANTS").ok();
    let mutants: Vec<_> = MUTANTS
        .iter()
        .filter(|mutant| only.as_ref().is_none_or(|only| mutant.program == only))
        .collect();
    assert!(!mutants.is_empty(), "no mutants of {only:?}");
    let missed = Mutex::new(Vec::new());
    on_all_cores(mutants.iter(), |mutant| {
        let Mutant { program, file, line, change, .. } = mutant;
        let what = format!("{program}: {file}: {change:?} of {:?}", line.0);
        let (program, mutation) = (programs::named(program), mutant.mutation());
        let mut report = String::new();
        let caught = schedules(program, numbers()).zip(1..).find_map(|(simulation, number)| {
            let error = failure(program, simulation.mutation(mutation.clone()))?;
            report = error.to_string();
            mutant.is_named_by(&report).then_some(number)
        });
        match caught {
            Some(number) => println!("{what}: caught in schedule {number}: {report}"),
            None => {
                println!("{what}: MISSED: {report}");
                missed.lock().unwrap().push(what);
            }
        }
    });
    let missed = missed.into_inner().unwrap();
    println!("{} of {} caught", mutants.len() - missed.len(), mutants.len());
    assert!(missed.is_empty(), "missed: {missed:#?}");
}

/// Returns the numbers of an original's schedules, one for each `one_in` of these, but at least
/// one.
fn of_original(numbers: Range<u64>, one_in: u64) -> Range<u64> {
    let [first, end] = [numbers.start, numbers.end].map(|number| number.div_ceil(one_in));
    first..end.max(first + 1)
}

#[test]
fn an_original_runs_in_at_least_one_schedule() {
    assert_eq!(of_original(1..10, 50), 1..2);
    assert_eq!(of_original(1000..2000, 50), 20..40);
    assert_eq!(of_original(0..100, 1), 0..100);
}

/// Checks that the simulator finds no error in an unchanged program.
fn passes(program: &Program) {
    let all = std::env::var_os("DEVCOMM_ORIGINALS").is_some_and(|which| which == "all");
    let one_in = if all { 1 } else { program.one_in };
    let numbers = of_original(numbers(), one_in);
    on_all_cores(schedules(program, numbers.clone()), |simulation| {
        let text = simulation.to_string();
        let found = failure(program, simulation);
        assert!(found.is_none(), "{}, {text}: {}", program.name, found.unwrap());
    });
    let count = numbers.end - numbers.start;
    println!("{}: nothing found in {count} schedules, {numbers:?}", program.name);
}
