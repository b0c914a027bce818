//! A file of rows, as any version of a comparison's `--json` wrote it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::contender::Variant;
use crate::plot;
use crate::table::Report;
use crate::versus;

/// A file, its rows sorted into cases.
pub struct File {
    /// The name, without folder.
    pub name: String,
    pub header: Header,
    /// What is compared, in the order of the rows.
    pub columns: Vec<Column>,
    /// The rows of each size, type or shape, at most one for each column.
    pub cases: Vec<Vec<Row>>,
    /// The rows, drawn; `None` for rows of another version and for rows without times.
    pub plot: Option<String>,
}

/// What a file holds.
#[derive(Deserialize)]
pub struct Content {
    pub header: Header,
    #[serde(deserialize_with = "rows")]
    pub rows: Vec<Row>,
}

/// The rows of a comparison; of `twins`, each is one for each language.
fn rows<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Row>, D::Error> {
    let mut rows = Vec::new();
    for row in Vec::<Value>::deserialize(from)? {
        match row.get("rust_us") {
            Some(_) => rows.extend(Twins::deserialize(row).map_err(D::Error::custom)?.rows()),
            None => rows.push(Row::deserialize(row).map_err(D::Error::custom)?),
        }
    }
    Ok(rows)
}

/// What is read of the header; what other versions do not write is missing.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Header {
    pub date: Option<String>,
    pub command: Vec<String>,
    pub ranks: usize,
    pub machine: Option<Machine>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Machine {
    pub gpu: String,
    pub state: Option<State>,
    pub links: Option<String>,
    pub threads: Option<bool>,
    pub nccl: Option<String>,
    pub nvls: Option<String>,
    pub rma_plugin: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub struct State {
    pub driver: Option<String>,
    pub sm_clock: Option<String>,
    pub max_sm_clock: Option<String>,
    pub memory_clock: Option<String>,
    pub power_limit: Option<String>,
}

/// What is read of a row.
#[derive(Default, Deserialize)]
pub struct Row {
    pub variant: String,
    /// Of `twins`.
    #[serde(skip)]
    pub kernel: Option<String>,
    #[serde(default)]
    pub in_place: bool,
    #[serde(rename = "type")]
    pub dtype: Option<String>,
    pub redop: Option<String>,
    pub size: Option<u64>,
    pub m: Option<u64>,
    pub n: Option<u64>,
    pub k: Option<u64>,
    pub blocks: Option<u32>,
    pub threads: Option<u32>,
    pub time_us: Option<f64>,
    pub busbw: Option<f64>,
    pub wrong: Option<u64>,
    pub noise_percent: Option<f64>,
    pub algorithm: Option<String>,
    pub l2: Option<String>,
    pub power_w: Option<f64>,
    pub sm_mhz: Option<f64>,
}

/// What is read of a row of `twins`.
#[derive(Deserialize)]
struct Twins {
    kernel: String,
    dtype: String,
    bytes: u64,
    blocks: u32,
    threads: u32,
    rust_us: f64,
    cpp_us: f64,
    rust_wrong: Option<u64>,
    cpp_wrong: Option<u64>,
}

impl Twins {
    fn rows(&self) -> [Row; 2] {
        let sides = [
            (Variant::Rust, self.rust_us, self.rust_wrong),
            (Variant::Cpp, self.cpp_us, self.cpp_wrong),
        ];
        sides.map(|(variant, time_us, wrong)| Row {
            variant: variant.name().to_owned(),
            kernel: Some(self.kernel.clone()),
            dtype: Some(self.dtype.clone()),
            size: Some(self.bytes),
            blocks: Some(self.blocks),
            threads: Some(self.threads),
            time_us: Some(time_us),
            wrong,
            ..Row::default()
        })
    }
}

/// A variant, in place or not.
#[derive(Clone, PartialEq)]
pub struct Column {
    variant: String,
    in_place: bool,
}

/// Whose a variant is, in a ratio.
#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Rust,
    Others,
}

impl Content {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(path, &text(path)?)
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        serde_json::from_str(text).with_context(|| no_rows(path))
    }
}

fn text(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn no_rows(path: &Path) -> String {
    format!("{} has no rows of a comparison (--json)", path.display())
}

impl Header {
    /// The benchmark, such as `all-reduce`; empty without one.
    pub fn subcommand(&self) -> &str {
        self.command.get(1).map_or("", String::as_str)
    }

    /// Whether launches were captured as graphs.
    pub fn in_graphs(&self) -> bool {
        self.flag(&["-G", "--cudagraph"]).is_some_and(|graphs| graphs != "0")
    }

    /// The value of a flag on the command line, as `-n 20` or `--iters=20`.
    pub fn flag(&self, names: &[&str]) -> Option<&str> {
        let words = &self.command;
        let next = words.iter().skip(1).map(|word| Some(word.as_str())).chain([None]);
        words.iter().zip(next).find_map(|(word, next)| match word.split_once('=') {
            Some((name, value)) => names.contains(&name).then_some(value),
            None => next.filter(|_| names.contains(&word.as_str())),
        })
    }
}

impl File {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let (shown, text) = (path.display(), text(path)?);
        let Content { header, rows } = Content::parse(path, &text)?;
        ensure!(!rows.is_empty(), no_rows(path));
        ensure!(header.command.len() > 1, "{shown} does not name the command that wrote it");
        let mut columns = Vec::new();
        let mut cases: Vec<Vec<Row>> = Vec::new();
        for row in rows {
            let column = row.column();
            if !columns.contains(&column) {
                columns.push(column.clone());
            }
            // A barrier has no size: its next grid is another case.
            let of_case = |case: &&mut Vec<Row>| {
                case[0].is_like(&row) && case.iter().all(|other| other.column() != column)
            };
            match cases.iter_mut().rev().find(of_case) {
                Some(case) => case.push(row),
                None => cases.push(vec![row]),
            }
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let report: Option<Report<versus::Row>> = serde_json::from_str(&text).ok();
        let plot = report.as_ref().and_then(plot::svg);
        Ok(Self { name, header, columns, cases, plot })
    }

    /// The plot's name, without folder.
    pub fn plot_name(&self) -> String {
        Path::new(&self.name).with_extension("svg").display().to_string()
    }

    /// The command line, without the files that it read and wrote.
    pub fn command(&self) -> String {
        let mut words = self.header.command.iter();
        let mut kept = Vec::new();
        while let Some(word) = words.next() {
            let (flag, value) = word.split_once('=').map_or((&**word, None), |(f, v)| (f, Some(v)));
            match ["--json", "--csv", "--plot", "--compare"].contains(&flag) {
                true if value.is_none() => _ = words.next(),
                true => {}
                false => kept.push(word.as_str()),
            }
        }
        kept.join(" ")
    }

    /// All rows.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.cases.iter().flatten()
    }
}

/// The row with the least time of those that are of a side.
pub fn fastest(case: &[Row], side: Side) -> Option<&Row> {
    let of_side = case.iter().filter(|row| row.side() == Some(side));
    let timed = of_side.filter_map(|row| Some((row.time_us?, row)));
    Some(timed.min_by(|a, b| a.0.total_cmp(&b.0))?.1)
}

/// The time of the fastest variant in Rust divided by that of the fastest of another library or,
/// without one, by that of the kernel in C++.
pub fn ratio(case: &[Row]) -> Option<f64> {
    let cpp = || case.iter().find(|row| row.variant == Variant::Cpp.name());
    let others = fastest(case, Side::Others).or_else(cpp)?;
    Some(fastest(case, Side::Rust)?.time_us? / others.time_us?)
}

impl Row {
    pub fn column(&self) -> Column {
        Column { variant: self.variant.clone(), in_place: self.in_place }
    }

    /// Whether it is of the same type, size and shape.
    fn is_like(&self, other: &Self) -> bool {
        let case = |row: &Self| (row.size, row.shape());
        let text = |row: &Self| [row.kernel.clone(), row.dtype.clone(), row.l2.clone()];
        case(self) == case(other) && text(self) == text(other)
    }

    /// m, n and k of a product.
    pub fn shape(&self) -> Option<[u64; 3]> {
        Some([self.m?, self.n?, self.k?])
    }

    /// Of a product: 10^12 operations per second.
    pub fn tflops(&self) -> Option<f64> {
        let [m, n, k] = self.shape()?.map(|extent| extent as f64);
        Some(2.0 * m * n * k / self.time_us? / 1e6)
    }

    /// `None` for what is in no ratio: the same kernel in C++, copy engines, and variants that this
    /// version does not know.
    pub fn side(&self) -> Option<Side> {
        match Variant::from_str(&self.variant, false).ok()? {
            variant if is_of_others(variant) => Some(Side::Others),
            Variant::Cpp | Variant::CopyEngine => None,
            _ => Some(Side::Rust),
        }
    }
}

fn is_of_others(variant: Variant) -> bool {
    use Variant::{
        CublasLt, Nccl, NcclAllToAll, NcclSym, NcclTestsLsa, NcclTestsLsaVector, TorchFused,
        TorchOneShot, TorchTwoShot,
    };
    let of_torch = matches!(variant, TorchOneShot | TorchTwoShot | TorchFused);
    let of_nccl = matches!(variant, Nccl | NcclSym | NcclAllToAll);
    of_torch || of_nccl || matches!(variant, CublasLt | NcclTestsLsa | NcclTestsLsaVector)
}

impl Column {
    /// As a heading.
    pub fn name(&self) -> String {
        format!("`{}`{}", self.variant, if self.in_place { " in place" } else { "" })
    }
}
