//! The all-reduces of nccl-tests' own kernels: `all_reduce_perf -D`, run as a process for each type
//! and kernel.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use devcomm_locate::{NcclPart, find_nccl};

use crate::base::options::{RunOptions, SizeOptions};
use crate::contenders::contender::Variant;
use crate::contenders::foreign::{self, Foreign};

/// nccl-tests' variants, and their numbers for `-D`.
pub const VARIANTS: [(Variant, u32); 2] =
    [(Variant::NcclTestsLsa, 1), (Variant::NcclTestsLsaVector, 2)];

/// The types that its kernels add, and their bytes and names in nccl-tests.
pub const TYPES: [(&str, usize, &str); 2] = [("f32", 4, "float"), ("f16", 2, "half")];

/// What to measure.
pub struct Measurement<'a> {
    pub program: &'a Path,
    pub gpus: usize,
    pub sizes: &'a SizeOptions,
    /// The largest message unless the sizes have one.
    pub largest: usize,
    pub run: &'a RunOptions,
}

impl Measurement<'_> {
    /// Measures a kernel and a type. The process is ended if it prints nothing for as long as
    /// `patience`; a pipe's output comes in blocks of several rows.
    pub fn run(
        &self,
        (variant, implementation): (Variant, u32),
        (dtype, bytes, name): (&str, usize, &str),
        patience: Duration,
    ) -> Result<Vec<Foreign>> {
        let program = format!("all_reduce_perf -D {implementation} -d {name}");
        let mut rows = BTreeMap::<usize, (Vec<f64>, Option<usize>)>::new();
        let command = self.command(implementation, name);
        foreign::run(&program, [(program.clone(), command)], patience, |line| {
            if let Some((size, seconds, wrong)) = row(line, name) {
                let (times, all_wrong) = rows.entry(size).or_default();
                if times.is_empty() {
                    eprintln!("{program}: {line}");
                }
                times.push(seconds);
                *all_wrong = all_wrong.map_or(wrong, |all| Some(all + wrong.unwrap_or(0)));
            }
            // Wrong results are a failure of the program, but here they are a row's.
            Ok(line.starts_with("# Out of bounds values"))
        })?;
        let rounds = self.run.rounds;
        let result = |count: usize| {
            let size = count * bytes;
            let (mut times, wrong) = rows.remove(&size).unwrap_or_default();
            let has = times.len();
            ensure!(has >= rounds, "{program} has printed {has} of {rounds} rows of {size} B");
            // Sizes that are rounded down to the same one have rows of their own.
            times.truncate(rounds);
            Ok(Foreign { variant, dtype: dtype.to_owned(), size, shape: None, times, wrong })
        };
        self.sizes.counts(self.largest, bytes)?.into_iter().map(result).collect()
    }

    fn command(&self, implementation: u32, dtype: &str) -> Command {
        let RunOptions { iters, warmup, check, graph, host, rounds, .. } = self.run;
        let SizeOptions { min, max, factor, step } = self.sizes;
        let max = max.unwrap_or(self.largest.max(*min));
        let step = step.map_or(("-f", *factor), |step| ("-i", step));
        let mut command = Command::new(self.program);
        for (flag, value) in [
            ("-D", implementation as usize),
            ("-R", 2),
            ("-g", self.gpus),
            ("-b", (*min).max(1)),
            ("-e", max),
            step,
            ("-n", *iters),
            ("-w", *warmup),
            ("-c", *check as usize),
            ("-G", *graph),
            ("-C", usize::from(*host)),
            ("-N", *rounds),
            // The slowest rank's time.
            ("-a", 3),
        ] {
            command.args([flag, &value.to_string()]);
        }
        command.args(["-d", dtype, "-o", "sum"]);
        if let Some(path) = library_path() {
            command.env("LD_LIBRARY_PATH", path);
        }
        command
    }
}

/// The folders of libraries, with that of devcomm's NCCL first.
fn library_path() -> Option<OsString> {
    let nccl = find_nccl(None, NcclPart::Library, |_| Ok(())).ok()?;
    let folder = nccl.library?.parent()?.to_owned();
    let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&others))).ok()
}

/// A row of nccl-tests' table, out of place: bytes, seconds, wrong elements.
fn row(line: &str, dtype: &str) -> Option<(usize, f64, Option<usize>)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [size, _, of, "sum", _, time, _, _, wrong, _, _, _, _] = words[..] else { return None };
    let wrong = wrong.parse::<f64>().ok().map(|wrong| wrong as usize);
    let row = (size.parse().ok()?, time.parse::<f64>().ok()? / 1e6, wrong);
    (of == dtype).then_some(row)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::contenders::foreign::fake;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        sizes: SizeOptions,
        #[command(flatten)]
        run: RunOptions,
    }

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Runs a shell script in the program's place, on two GPUs.
    fn run(script: &str, args: &str, patience: Duration) -> Result<Vec<Foreign>> {
        let (_folder, program) = fake::program("all_reduce_perf", script);
        let Cli { sizes, run } =
            Cli::parse_from(["bench"].into_iter().chain(args.split_whitespace()));
        let measurement =
            Measurement { program: &program, gpus: 2, sizes: &sizes, largest: 64, run: &run };
        measurement.run(VARIANTS[1], TYPES[0], patience)
    }

    /// The output of nccl-tests, of two cycles.
    const OUTPUT: &str = "cat <<'END'
# nccl-tests version 2.19.6 nccl-headers=23203 nccl-library=23203
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 9 maxBytes 64 step: 7(factor) warmup iters: 5 iters: 20
#
#                                      out-of-place                  in-place
#    size      count    type redop  root     time  algbw  busbw #wrong     time
#     (B) (elements)                       (us) (GB/s) (GB/s)            (us)
        8          2   float   sum    -1     8.21   0.00   0.00      0     8.00   0.00   0.00      0
       60         15   float   sum    -1  12345.6   0.01   0.01      0     8.20   0.01   0.01      9
        8          2   float   sum    -1     8.01   0.00   0.00      0     8.00   0.00   0.00      0
       60         15   float   sum    -1     9.25   0.01   0.01      3     8.20   0.01   0.01      0
# Out of bounds values : 12 FAILED
# Avg bus bandwidth    : 0.005
END
";

    #[test]
    fn the_rows_out_of_place_are_read_and_wrong_elements_are_theirs() {
        let args = "-D 2 -R 2 -g 2 -b 9 -e 64 -f 7 -n 20 -w 5 -c 1 -G 0 -C 0 -N 2 -a 3 -d float \
                    -o sum";
        let script = format!("[ \"$*\" = '{args}' ] || exit 1\n{OUTPUT}exit 1");
        let result = |size, times: [f64; 2], wrong| Foreign {
            variant: Variant::NcclTestsLsaVector,
            dtype: "f32".to_owned(),
            size,
            shape: None,
            times: times.map(|us| us / 1e6).to_vec(),
            wrong: Some(wrong),
        };
        let expected = [result(8, [8.21, 8.01], 0), result(60, [12345.6, 9.25], 3)];
        assert_eq!(run(&script, "-b 9 -f 7 --rounds 2", PATIENCE).unwrap(), expected);
        let unchecked = OUTPUT.replace("      0     8.", "    N/A     8.");
        let results = run(&unchecked, "-b 9 -f 7 --rounds 1 -c 0", PATIENCE).unwrap();
        assert_eq!((results[0].wrong, &results[0].times[..]), (None, &[8.21 / 1e6][..]));
    }

    #[test]
    fn a_program_that_fails_or_prints_other_rows_is_told() {
        let fails = |script: &str, args: &str, patience, words: &str| {
            let error = format!("{:#}", run(script, args, patience).unwrap_err());
            assert!(error.contains(words), "{error}");
        };
        let name = "all_reduce_perf -D 2 -d float has";
        let script = "echo libnccl.so.2: cannot open shared object file >&2; exit 127";
        fails(script, "", PATIENCE, &format!("{name} failed (exit status: 127): libnccl.so.2:"));
        let script = "echo Test NCCL failure; exit 3";
        fails(script, "", PATIENCE, &format!("{name} failed (exit status: 3): Test NCCL failure"));
        fails("exit 1", "", PATIENCE, "(exit status: 1): no message");
        let printed = |has: &str| format!("{name} printed {has}");
        fails("exec sleep 60", "", Duration::ZERO, &printed("nothing for 0 s"));
        fails(OUTPUT, "-b 9 -f 7", PATIENCE, &printed("2 of 21 rows of 8 B"));
        fails(OUTPUT, "-b 4 --rounds 2", PATIENCE, &printed("0 of 2 rows of 4 B"));
    }
}
