//! The page: an introduction and, for each file, its conditions and its table.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::file::{File, Row, Side, fastest, ratio};
use super::table::{NONE, Table, number};
use crate::stats::geometric_mean;

const INTRODUCTION: &str = "\
# Measurements

`devcomm-bench report` makes this page from files that `devcomm-bench` writes with `--json`; each
section links its file.

Variants take turns, in random order within a round. *us* is the GPU time of one operation in
microseconds, of the slowest rank, the median of the rounds; a round is a batch of `-n` operations,
launched one by one or, with `-G 1`, as one CUDA graph. Sizes and bandwidths are nccl-tests'.

* `rust` and `rust-...` are devcomm's kernels and operations, `cpp` is the kernel of `rust` in CUDA
  C++. `nccl` is NCCL's call on memory that is not registered, `nccl-sym` on symmetric windows,
  `cublaslt` cuBLASLt's product, `torch-...` PyTorch's kernels on symmetric memory,
  `nccl-tests-...` nccl-tests' kernels.
* *ratio*: the time of the row's fastest variant in Rust divided by that of the fastest variant of
  another library or, without one, by that of `cpp`. Below 1, Rust is faster.
* *busbw* (bus bandwidth) and *TFLOP/s* are of the fastest variant in Rust.
* *algorithm*: what a library or operation chose.
* *#wrong*: wrong elements in the results of all variants and ranks.
* *noise*: the interquartile range of the times in percent of their median, of the row's noisiest
  variant.
* *W* and *MHz*: power and SM clock of rank 0's GPU while the fastest variant in Rust ran and, after
  the slash, the fastest one of another library. The power sensor is slow: only batches longer than
  about 100 ms tell variants apart.

In the plots the axes are logarithmic, and a dashed line is the bandwidth for which NVIDIA specifies
the links.
";

/// The benchmarks in the order of the page, and their titles.
const TITLES: &[(&str, &str)] = &[
    ("all-reduce", "All-reduce"),
    ("reduce-scatter", "Reduce-scatter"),
    ("all-gather", "All-gather"),
    ("all-to-all", "All-to-all"),
    ("broadcast", "Broadcast"),
    ("rmsnorm-allreduce", "All-reduce and RMSNorm"),
    ("barrier", "Barrier"),
    ("put", "Put"),
    ("signal", "Signal"),
    ("p2p", "Copies between two GPUs"),
    ("gemm", "Matrix product"),
    ("gemm-allreduce", "Matrix product and all-reduce"),
    ("gemm-reduce-scatter", "Matrix product and reduce-scatter"),
    ("allgather-gemm", "All-gather and matrix product"),
    ("gemm-ladder", "Matrix product, step by step"),
    ("ep", "Expert parallelism"),
    ("twins", "Kernels in Rust and in C++"),
];

/// The page. `folder` is where its links find the files.
pub fn markdown(files: &[File], folder: &str) -> String {
    let place = |file: &File| TITLES.iter().position(|(name, _)| *name == file.header.subcommand());
    let mut files: Vec<&File> = files.iter().collect();
    files.sort_by_key(|file| (place(file).unwrap_or(TITLES.len()), file.header.subcommand()));
    let mut page = INTRODUCTION.to_owned();
    for of_benchmark in files.chunk_by(|a, b| a.header.subcommand() == b.header.subcommand()) {
        page += &format!("\n## {}\n", title(of_benchmark[0]));
        for file in of_benchmark {
            page += &section(file, folder);
        }
    }
    page
}

fn title(file: &File) -> &str {
    let known = TITLES.iter().find(|(name, _)| *name == file.header.subcommand());
    known.map_or(file.header.subcommand(), |(_, title)| title)
}

fn section(file: &File, folder: &str) -> String {
    let table = if let [case] = &*file.cases { variants(file, case) } else { cases(file) };
    let mut section = format!(
        "\n### {}\n\n```console\n$ {}\n```\n\n{}\n{table}",
        heading(file),
        file.command(),
        filled(&conditions(file, folder)),
    );
    if file.plot.is_some() {
        section += &format!("\n![{}]({folder}/{})\n", heading(file), file.plot_name());
    }
    if let Some(summary) = summary(file) {
        section += &format!("\n{}", filled(&summary));
    }
    section
}

/// The benchmark, the types, the shapes, the GPUs.
fn heading(file: &File) -> String {
    let types = types(file);
    let mut parts = vec![title(file).to_owned()];
    if !types.is_empty() {
        parts.push(types.into_iter().collect::<Vec<_>>().join(" and "));
    }
    parts.extend(file.header.flag(&["--set"]).map(|set| format!("set {set}")));
    if file.rows().all(|row| row.l2.as_deref() == Some("cold")) {
        parts.push("cold L2 cache".to_owned());
    }
    parts.push(match (&file.header.machine, file.header.ranks) {
        (Some(machine), 1) => machine.gpu.clone(),
        (Some(machine), ranks) => format!("{ranks} x {}", machine.gpu),
        (None, ranks) => format!("{ranks} simulated GPUs"),
    });
    parts.push(if file.header.in_graphs() { "CUDA graphs" } else { "plain launches" }.to_owned());
    parts.join(", ")
}

/// The element types; none for barriers.
fn types(file: &File) -> BTreeSet<&str> {
    file.rows().filter_map(|row| row.dtype.as_deref()).filter(|name| *name != NONE).collect()
}

/// What the file's header tells.
fn conditions(file: &File, folder: &str) -> String {
    let mut text = format!("[{name}]({folder}/{name}).", name = file.name);
    if let Some(date) = &file.header.date {
        text += &format!(" {date}.");
    }
    let Some(machine) = &file.header.machine else { return text };
    let mut say = |what: &str, value: &Option<String>| {
        if let Some(value) = value {
            let _ = write!(text, " {what} {value},");
        }
    };
    let state = machine.state.as_ref();
    say("Driver", &state.and_then(|state| state.driver.clone()));
    say("NCCL", &machine.nccl);
    say("NVLS", &machine.nvls);
    say("links", &machine.links);
    say("GIN by", &machine.rma_plugin);
    say("SM clock at most", &state.and_then(|state| state.max_sm_clock.clone()));
    say("before the run", &state.and_then(|state| state.sm_clock.clone()));
    say("memory clock", &state.and_then(|state| state.memory_clock.clone()));
    say("power limit", &state.and_then(|state| state.power_limit.clone()));
    let threads = machine.threads.filter(|_| file.header.ranks > 1);
    let form = |threads| if threads { "threads of one process" } else { "one process each" };
    say("ranks are", &threads.map(|threads| form(threads).to_owned()));
    text.pop();
    text + "."
}

/// A row for each case, and a column for each variant.
fn cases(file: &File) -> Table {
    let cells = |cell: &dyn Fn(&[Row]) -> String| -> Vec<String> {
        file.cases.iter().map(|case| cell(case)).collect()
    };
    let one = |case: &[Row], side, digits, value: &dyn Fn(&Row) -> Option<f64>| {
        number(fastest(case, side).and_then(value), digits)
    };
    let mut table = Table::default();
    if file.rows().any(|row| row.kernel.is_some()) {
        table.column("kernel", cells(&|case| case[0].kernel.clone().unwrap_or_default()));
    }
    if types(file).len() > 1 {
        table.column("type", cells(&|case| case[0].dtype.clone().unwrap_or(NONE.to_owned())));
    }
    let operations: BTreeSet<_> = file.rows().filter_map(|row| row.redop.as_deref()).collect();
    if operations.len() > 1 {
        table.column("operation", cells(&|case| case[0].redop.clone().unwrap_or_default()));
    }
    table.column(case_heading(file), cells(&|case| label(&case[0])));
    for column in &file.columns {
        let of = |case: &[Row]| case.iter().find(|row| row.column() == *column)?.time_us;
        table.column(format!("{} us", column.name()), cells(&|case| number(of(case), 2)));
    }
    table.column("ratio", cells(&|case| number(ratio(case), 3)));
    let (heading, digits, rate) = rate(file);
    table.column(heading, cells(&|case| one(case, Side::Rust, digits, &rate)));
    for column in &file.columns {
        let of = |case: &[Row]| {
            let row = case.iter().find(|row| row.column() == *column);
            row.map_or(NONE.to_owned(), algorithm)
        };
        table.column(format!("{} algorithm", column.name()), cells(&of));
    }
    table.column("#wrong", cells(&|case| wrong(case)));
    table.column("noise %", cells(&|case| number(noise(case), 1)));
    if is_of_products(file) {
        for (heading, value) in SENSORS {
            let sides = |case: &[Row]| {
                let of = |side| one(case, side, 0, &value);
                match (of(Side::Rust), of(Side::Others)) {
                    (rust, others) if others == NONE => rust,
                    (rust, others) => format!("{rust} / {others}"),
                }
            };
            table.column(heading, cells(&sides));
        }
    }
    table
}

/// A row for each variant of the only case.
fn variants(file: &File, case: &[Row]) -> Table {
    let cells = |cell: &dyn Fn(&Row) -> String| -> Vec<String> { case.iter().map(cell).collect() };
    let others = fastest(case, Side::Others).and_then(|row| row.time_us);
    let mut table = Table::default();
    table.column(case_heading(file), cells(&label));
    table.column("variant", cells(&|row| row.column().name()));
    table.column("us", cells(&|row| number(row.time_us, 2)));
    let over = |row: &Row| Some(row.time_us? / others?);
    table.column("time over the best library's", cells(&|row| number(over(row), 3)));
    let (heading, digits, rate) = rate(file);
    table.column(heading, cells(&|row| number(rate(row), digits)));
    table.column("algorithm", cells(&algorithm));
    table.column("#wrong", cells(&|row| wrong(std::slice::from_ref(row))));
    table.column("noise %", cells(&|row| number(row.noise_percent, 1)));
    if is_of_products(file) {
        for (heading, value) in SENSORS {
            table.column(heading, cells(&|row| number(value(row), 0)));
        }
    }
    table
}

/// A value of a row.
type Value = fn(&Row) -> Option<f64>;

const SENSORS: [(&str, Value); 2] = [("W", |row| row.power_w), ("MHz", |row| row.sm_mhz)];

fn is_of_products(file: &File) -> bool {
    file.rows().any(|row| row.shape().is_some())
}

/// The heading of what tells how fast a case is, its digits, and its value.
fn rate(file: &File) -> (&'static str, usize, Value) {
    match is_of_products(file) {
        true => ("TFLOP/s", 1, Row::tflops),
        false => ("busbw GB/s", 2, |row| row.busbw),
    }
}

fn case_heading(file: &File) -> &'static str {
    let has_sizes = file.rows().any(|row| row.size.is_some_and(|size| size > 0));
    match (is_of_products(file), has_sizes) {
        (true, _) => "m x n x k",
        (_, true) => "size",
        _ => "blocks x threads",
    }
}

/// The shape, the size or, without either, the grid.
fn label(row: &Row) -> String {
    match (row.shape(), row.size, row.blocks.zip(row.threads)) {
        (Some([m, n, k]), ..) => format!("{m} x {n} x {k}"),
        (_, Some(size @ 1..), _) => bytes(size),
        (_, _, Some((blocks, threads))) => format!("{blocks} x {threads}"),
        _ => NONE.to_owned(),
    }
}

/// A size, in the largest unit that it is a multiple of.
fn bytes(size: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(shift, _)| size.trailing_zeros() >= *shift);
    unit.map_or(format!("{size} B"), |(shift, unit)| format!("{} {unit}", size >> shift))
}

/// The plan of a product in Rust; of another library's algorithm, tile, cluster and split-K.
fn algorithm(row: &Row) -> String {
    let Some(text) = &row.algorithm else { return NONE.to_owned() };
    let text = text.split(" (").next().unwrap_or_default();
    let parts: Vec<&str> = match row.side() {
        Some(Side::Rust) => text.split(", ").take(1).collect(),
        _ => text.split(", ").filter(|part| !is_usual(part)).collect(),
    };
    parts.join(", ")
}

fn is_usual(part: &str) -> bool {
    let usual = ["split-K 1", "cluster 1x1x1", "cluster AUTO"];
    part.starts_with("stages ") || usual.contains(&part)
}

fn wrong(case: &[Row]) -> String {
    let checked = case.iter().filter_map(|row| row.wrong).reduce(|sum, wrong| sum + wrong);
    checked.map_or(NONE.to_owned(), |wrong| wrong.to_string())
}

fn noise(case: &[Row]) -> Option<f64> {
    case.iter().filter_map(|row| row.noise_percent).reduce(f64::max)
}

/// The ratios of all cases, if there are several.
fn summary(file: &File) -> Option<String> {
    let ratios = file.cases.iter().filter_map(|case| Some((ratio(case)?, &case[0])));
    let (greatest, of) = ratios.clone().max_by(|a, b| a.0.total_cmp(&b.0))?;
    let mean = geometric_mean(ratios.clone().map(|(ratio, _)| ratio))?;
    let of = label(of);
    (ratios.count() > 1).then(|| match file.header.subcommand() {
        "gemm" => format!(
            "cuBLASLt's time over that of Rust (above 1, Rust is faster): geometric mean {:.3}, \
             least {:.3}, of {of}.",
            1.0 / mean,
            1.0 / greatest
        ),
        _ => format!("Ratio: geometric mean {mean:.3}, greatest {greatest:.3}, of {of}."),
    })
}

/// A paragraph in lines of at most 100 columns.
fn filled(text: &str) -> String {
    let mut lines = String::new();
    let mut columns = 0;
    for word in text.split(' ') {
        let length = word.chars().count();
        match columns {
            0 => {}
            _ if columns + 1 + length > 100 => {
                lines.push('\n');
                columns = 0;
            }
            _ => {
                lines.push(' ');
                columns += 1;
            }
        }
        lines += word;
        columns += length;
    }
    lines + "\n"
}
