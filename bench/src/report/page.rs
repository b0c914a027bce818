//! The page: for each operation a table that summarises the ratios of its runs, and a plot for each
//! machine.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::file::File;
use crate::report::ratio::{Standing, by_plan};

const INTRODUCTION: &str = "\
# Measurements

`devcomm-bench report` makes this page from files that `devcomm-bench` writes with `--json`.
`devcomm-bench rows FILE` prints a file's command, conditions and rows: times, bandwidths, plans,
noise and the number of wrong elements of every variant.

Variants of a run take turns, in random order within a round. A time is the GPU time of one
operation on the slowest rank, the median of the rounds. A round is a batch of operations, launched
one by one (*plain*) or as CUDA graphs.

* A *case* is a size or a shape of one type, and one plan if a run has several.
* A *ratio* is the time of devcomm's default, which is what a program gets that chooses nothing,
  over that of the fastest competitor in the same case. Below 1 devcomm is faster. The
  [table of roles](../bench/src/contenders/contest.rs) names the default and the competitors of each
  benchmark: NCCL's calls on memory that is not registered and on symmetric windows, in each of the
  configurations that a run has (`--nccl`), cuBLASLt, and peers (`--peers`): PyTorch's symmetric
  memory, FlashInfer, vLLM's all-reduce and nccl-tests' kernels, where a run has them. Products
  without communication, bare stores, mixes of both sides and other forms of devcomm are in no
  ratio. A run that names plans (`--plan`) has them in place of the default. Kernels in C++ compete
  only with the same kernels in Rust.
* *mean* is the geometric mean of the ratios, and *worst* the greatest, with its case.
* *above 1* counts the cases in which devcomm is slower, ties included.
* *ties* counts the cases without a verdict: the ratio differs from 1 by less than 3 % or by less
  than the noise (the interquartile range of the rounds, of the noisier side). After three starts of
  the program a case is a tie if the starts contradict each other.
* *after another kernel* is a line of the same run (`--between`): a plain kernel, on which no launch
  can depend, ran before each call of both sides, and its own time is left out.
* *run* has the flags that choose cases and plans, `:` and the plan, if a run has several.

In plots the axes are logarithmic. A dashed line is the bandwidth for which NVIDIA specifies the
links or, in plots of ratios, their geometric mean.
";

/// The benchmarks in the order of the page, and their titles.
const TITLES: &[(&str, &str)] = &[
    ("all-reduce", "All-reduce"),
    ("reduce-scatter", "Reduce-scatter"),
    ("all-gather", "All-gather"),
    ("all-to-all", "All-to-all"),
    ("all-to-all-v", "All-to-all of uneven parts"),
    ("broadcast", "Broadcast"),
    ("rmsnorm-allreduce", "All-reduce and RMSNorm"),
    ("launch", "Launches"),
    ("barrier", "Barrier"),
    ("put", "Put"),
    ("signal", "Signal"),
    ("p2p", "Copies between two GPUs"),
    ("gemm", "Matrix product"),
    ("grouped-gemm", "Products of groups of rows"),
    ("gemm-allreduce", "Matrix product and all-reduce"),
    ("gemm-reduce-scatter", "Matrix product and reduce-scatter"),
    ("allgather-gemm", "All-gather and matrix product"),
    ("gemm-ladder", "Matrix product, step by step"),
    ("ep", "Expert parallelism"),
    ("twins", "Kernels in Rust and in C++"),
];

/// Returns the page. `folder` is where its links find the files.
pub fn markdown(files: &[File], folder: &str) -> String {
    let mut page = INTRODUCTION.to_owned();
    for (benchmark, title) in TITLES {
        let is_of = |file: &&File| file.header.subcommand() == *benchmark;
        let files: Vec<&File> = files.iter().filter(is_of).collect();
        if !files.is_empty() {
            page += &section(title, &files, folder);
        }
    }
    page + &conditions(files)
}

fn section(title: &str, files: &[&File], folder: &str) -> String {
    let mut text = format!(
        "\n## {title}\n\n\
         | machine | launches | type | run | cases | mean | worst | above 1 | ties | file |\n\
         |---|---|---|---|---|---|---|---|---|---|\n"
    );
    for file in files {
        let plans = by_plan(&file.ratios);
        let standings = plans.iter().map(|(plan, ratios)| (*plan, Standing::of(ratios)));
        let none = file.ratios.is_empty().then_some(("", None));
        for (plan, standing) in standings.chain(none) {
            text += &line(file, plan, standing.as_ref(), folder);
        }
    }
    let mut machines: Vec<String> = Vec::new();
    for file in files {
        let machine = file.header.machine_name();
        let here = files.iter().filter(|other| other.header.machine_name() == machine);
        let drawn = here.filter(|other| other.plot.is_some());
        // `rev` makes this the first of the files with the same number of rows.
        let largest = drawn.rev().max_by_key(|other| (other.header.in_graphs(), other.n_rows));
        if let (Some(file), false) = (largest, machines.contains(&machine)) {
            let caption = format!("{title}, {machine}, {}", file.stem());
            let _ = writeln!(text, "\n![{caption}]({folder}/{})", file.plot_name());
        }
        machines.push(machine);
    }
    text
}

/// Flags that choose neither cases nor plans, or that have a column of their own. Earlier versions
/// had `--torch` and `--all-reduce-perf`.
const OTHER_FLAGS: &str = "-g --ngpus -G --cudagraph -n --iters -w --warmup_iters -c --check \
    --rounds -T --timeout -d --dtype --datatype --torch --all-reduce-perf --peers";

fn line(file: &File, plan: &str, standing: Option<&Standing>, folder: &str) -> String {
    let File { header, types, .. } = file;
    let types: Vec<&str> = types.iter().map(String::as_str).collect();
    let flags = header.flags(OTHER_FLAGS);
    let mut plan = if plan.is_empty() { String::new() } else { format!(": {plan}") };
    plan += if file.is_checked { "" } else { " (not checked)" };
    let run = if flags.is_empty() { plan } else { format!("`{flags}`{plan}") };
    let figures = standing.map_or("- | - | - | - | -".to_owned(), |standing| {
        let Standing { cases, mean, worst, above, ties } = standing;
        let (case, worst) = (&worst.case, worst.value());
        format!("{cases} | {mean:.3} | {worst:.3} ({case}) | {above} | {ties}")
    });
    let mut links = format!("[rows]({folder}/{})", file.name);
    if file.plot.is_some() {
        let _ = write!(links, ", [plot]({folder}/{})", file.plot_name());
    }
    if let Some(date) = &header.date {
        let _ = write!(links, ", {date}");
    }
    let launches = if header.in_graphs() { "graphs" } else { "plain" };
    let (machine, types) = (header.machine_name(), types.join(", "));
    format!("| {machine} | {launches} | {types} | {run} | {figures} | {links} |\n")
}

/// Returns the machines of all files.
fn conditions(files: &[File]) -> String {
    let machines: BTreeSet<String> = files.iter().filter_map(machine).collect();
    let mut text = "\n## Machines\n\n\
                    | GPUs | driver | NCCL | NVLS | links | SM clock at most | memory clock \
                    | power limit | ranks are |\n|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    text.extend(machines);
    text
}

fn machine(file: &File) -> Option<String> {
    let machine = file.header.machine.as_ref()?;
    let state = machine.state.as_ref();
    let known = |value: Option<&String>| value.map_or("-", String::as_str).to_owned();
    let ranks = if machine.threads { "threads of one process" } else { "one process each" };
    let cells = [
        file.header.machine_name(),
        known(state.map(|state| &state.driver)),
        machine.nccl.clone(),
        machine.nvls.clone(),
        known(machine.links.as_ref()),
        known(state.map(|state| &state.max_sm_clock)),
        known(state.map(|state| &state.memory_clock)),
        known(state.map(|state| &state.power_limit)),
        (if file.header.ranks > 1 { ranks } else { "-" }).to_owned(),
    ];
    Some(format!("| {} |\n", cells.join(" | ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contenders::contest::CONTESTS;

    #[test]
    fn the_page_has_a_section_for_every_benchmark() {
        let names = |names: Vec<&'static str>| names.into_iter().collect::<BTreeSet<_>>();
        let titles = names(TITLES.iter().map(|(benchmark, _)| *benchmark).collect());
        assert_eq!(titles, names(CONTESTS.iter().map(|contest| contest.benchmark).collect()));
    }
}
