//! Tests of products of groups of rows, each with a B of its own.

use devcomm::{
    Activation, Buffer, DeviceSlice, Error, GemmPlan, GroupedGemm, HalfElement, Rank, Result,
    RowGroups, Stream,
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::on_gpus;
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

/// Groups of `sizes` rows, which begin at multiples of `alignment`, and the extents of each B.
#[derive(Clone, Debug)]
struct Case {
    sizes: Vec<usize>,
    alignment: usize,
    n: usize,
    k: usize,
}

/// The matrices of a case; A and C have room for `m` rows, and A has NaN where there is no group.
struct Matrices<T> {
    case: Case,
    m: usize,
    groups: RowGroups,
    host: [Vec<T>; 2],
    a: DeviceSlice<T>,
    b: DeviceSlice<T>,
    c: DeviceSlice<T>,
}

impl Case {
    fn new(sizes: &[usize], alignment: usize, [n, k]: [usize; 2]) -> Self {
        Self { sizes: sizes.to_vec(), alignment, n, k }
    }

    /// Returns the first row of each group, and after them the end.
    fn offsets(&self) -> Vec<usize> {
        let ends = self.sizes.iter().scan(0, |end, size| {
            *end += size.next_multiple_of(self.alignment);
            Some(*end)
        });
        [0].into_iter().chain(ends).collect()
    }

    /// Returns the group of each of `m` rows.
    fn group_of_rows(&self, m: usize) -> Vec<Option<usize>> {
        let mut groups = vec![None; m];
        for (group, (first, size)) in self.offsets().iter().zip(&self.sizes).enumerate() {
            groups[*first.min(&m)..(first + size).min(m)].fill(Some(group));
        }
        groups
    }
}

impl<T: HalfElement + Number> Matrices<T> {
    /// Makes matrices with room for three more rows than there are in groups, less `fewer`.
    fn new(rank: &Rank, case: Case, fewer: usize) -> Result<Self> {
        let comm = rank.communicator()?;
        let (n, k, count) = (case.n, case.k, case.sizes.len());
        let m = case.offsets()[count] + 3 - fewer;
        let problem = Problem { m, n: count * n, k, seed: 3 };
        let groups = RowGroups {
            offsets: comm.mem_alloc(count + 1)?.device_slice(),
            sizes: comm.mem_alloc(count)?.device_slice(),
        };
        let matrix = |len: usize| Ok::<_, Error>(comm.mem_alloc::<T>(len)?.device_slice());
        let host = [problem.factor(Factor::A, 0), problem.factor(Factor::B, 0)];
        let (a, b, c) = (matrix(m * k)?, matrix(count * n * k)?, matrix(m * n)?);
        b.copy_from_host(&host[1])?;
        let this = Self { case, m, groups, host, a, b, c };
        this.write_groups()?;
        Ok(this)
    }

    /// Writes where the groups are, and A's rows.
    fn write_groups(&self) -> Result<()> {
        let words = |numbers: &[usize]| numbers.iter().map(|x| *x as u32).collect::<Vec<_>>();
        self.groups.offsets.copy_from_host(&words(&self.case.offsets()))?;
        self.groups.sizes.copy_from_host(&words(&self.case.sizes))?;
        let mut a = self.host[0].clone();
        for (row, group) in a.chunks_mut(self.case.k).zip(self.case.group_of_rows(self.m)) {
            if group.is_none() {
                row.fill(T::nearest(f32::NAN));
            }
        }
        self.a.copy_from_host(&a)?;
        self.c.fill_bytes(0xff)
    }

    fn launch(&self, gemm: &GroupedGemm, activation: Option<Activation>) -> Result<()> {
        let Self { case: Case { n, k, .. }, m, groups, a, b, c, .. } = self;
        gemm.launch(a, b, c, groups, [*m, *n, *k], activation)
    }

    /// Checks every `step`-th column of each row of C: `right` holds for the exact sum and the
    /// element in rows of groups, and other rows are unchanged.
    fn check(&self, step: usize, right: impl Fn(f64, T) -> bool) -> Result<()> {
        let Self { case: Case { n, k, .. }, m, .. } = *self;
        let mut got = vec![T::nearest(0.0); m * n];
        self.c.copy_to_host(&mut got)?;
        let [a, b] = self.host.each_ref();
        let groups = self.case.group_of_rows(m);
        let mut wrong = Vec::new();
        for (row, got) in got.chunks(n).enumerate() {
            let columns = (row % step..n).step_by(step);
            for column in columns {
                let got = got[column];
                let is_right = match groups[row] {
                    None => got.value().is_nan(),
                    Some(group) => {
                        let a = a[row * k..][..k].iter();
                        let terms = a.zip(&b[(group * n + column) * k..][..k]);
                        let terms = terms.map(|(a, b)| a.value() * b.value());
                        right(terms.sum(), got)
                    }
                };
                if !is_right {
                    wrong.push(format!("row {row}, column {column}: {got:?}"));
                }
            }
        }
        let first = &wrong[..wrong.len().min(8)];
        assert!(wrong.is_empty(), "{:?}: {} are wrong: {first:#?}", self.case, wrong.len());
        Ok(())
    }

    /// Runs the products, and checks that sums are rounded once.
    fn multiply(&self, gemm: &GroupedGemm, stream: &Stream, step: usize) -> Result<()> {
        self.launch(gemm, None)?;
        stream.synchronize()?;
        self.check(step, rounded)
    }
}

/// Returns whether `got` is the rounded sum; `f32` holds the sum exactly.
fn rounded<T: Number>(sum: f64, got: T) -> bool {
    got == T::nearest(sum as f32)
}

/// Returns products by the plans of their shapes, and by each plan of this GPU.
fn by_every_plan(rank: &Rank, stream: &Stream) -> Result<Vec<GroupedGemm>> {
    let mut all = vec![GroupedGemm::new(stream)?];
    if rank.context().limits().compute_capability == (9, 0) {
        for plan in ["swapped:64x128:1", "swapped:128x128:1", "wide", "portable"] {
            all.push(GroupedGemm::new(stream)?.with_plan(plan.parse().unwrap())?);
        }
    }
    Ok(all)
}

/// Returns uneven groups, also without rows, before, between and after others, whose tiles have
/// rows of other groups or of no group; one group; all rows in one of many groups; no row at all;
/// more groups than have a counter of their own, in one and in several columns of tiles.
fn cases([n, k]: [usize; 2]) -> Vec<Case> {
    let mut many = vec![0; 300];
    for group in [3, 36, 37, 141, 298] {
        many[group] = group % 5 + 1;
    }
    let mut in_columns = vec![0; 130];
    (in_columns[1], in_columns[129]) = (2, 3);
    vec![
        Case::new(&[0, 5, 0, 0, 130, 1, 16, 261, 0], 1, [n, k]),
        Case::new(&[7, 128, 0, 9], 128, [n, k]),
        Case::new(&[40], 1, [n, k]),
        Case::new(&[0, 0, 150, 0], 16, [n, k]),
        Case::new(&[0, 0, 0], 1, [n, k]),
        Case::new(&many, 4, [8, k]),
        Case::new(&in_columns, 1, [n, k]),
    ]
}

#[test]
fn groups_are_multiplied_by_their_own_factor() {
    on_gpus("groups_are_multiplied_by_their_own_factor", 1, |rank| {
        let stream = rank.stream()?;
        for gemm in by_every_plan(rank, &stream)? {
            for case in cases([264, 72]) {
                Matrices::<bf16>::new(rank, case, 0)?.multiply(&gemm, &stream, 1)?;
            }
            // These have C of odd width, more terms than a pipeline has stages, another type.
            let case = Case::new(&[3, 140, 20], 1, [129, 808]);
            Matrices::<bf16>::new(rank, case, 0)?.multiply(&gemm, &stream, 1)?;
            let case = Case::new(&[30, 0, 60], 1, [64, 64]);
            Matrices::<f16>::new(rank, case, 0)?.multiply(&gemm, &stream, 1)?;
            if rank.is_simulated() {
                continue;
            }
            // Even and uneven groups of large products have more tiles than blocks.
            let even = vec![128; 64];
            let uneven: Vec<_> = (0..128).map(|group| group * group * 37 % 301).collect();
            for (sizes, alignment) in [(&even, 1), (&uneven, 1), (&uneven, 128)] {
                let case = Case::new(sizes, alignment, [1024, 1536]);
                Matrices::<bf16>::new(rank, case.clone(), 0)?.multiply(&gemm, &stream, 61)?;
            }
        }
        Ok(())
    });
}

/// Rows of these `k` are not aligned to 16 bytes.
#[test]
fn groups_of_any_rows_are_multiplied() {
    on_gpus("groups_of_any_rows_are_multiplied", 1, |rank| {
        let stream = rank.stream()?;
        let gemm = GroupedGemm::new(&stream)?;
        for case in cases([130, 34]) {
            Matrices::<bf16>::new(rank, case, 0)?.multiply(&gemm, &stream, 1)?;
        }
        let case = Case::new(&[30, 0, 60], 1, [65, 5]);
        Matrices::<f16>::new(rank, case, 0)?.multiply(&gemm, &stream, 1)
    });
}

#[test]
fn the_plan_of_groups_follows_from_their_shape() {
    on_gpus("the_plan_of_groups_follows_from_their_shape", 1, |rank| {
        let gemm = GroupedGemm::new(&rank.stream()?)?;
        let is_hopper = rank.context().limits().compute_capability == (9, 0);
        let on_hopper = |plan: &str| match is_hopper {
            true => plan.parse().unwrap(),
            false => GemmPlan::Portable,
        };
        for (groups, m, plan) in [
            (1, 48, "swapped:64x128:1"),
            (2, 97, "swapped:128x128:1"),
            (2, 256, "swapped:128x128:1"),
            (2, 257, "wide"),
            (2, 512, "wide"),
            (2, 513, "swapped:128x128:1"),
            (2, 768, "swapped:128x128:1"),
            (2, 769, "wide"),
            (usize::MAX, 1025, "swapped:64x128:1"),
        ] {
            assert_eq!(gemm.plan(groups, [m, 130, 72])?, on_hopper(plan), "{groups} groups, {m}");
        }
        assert_eq!(gemm.plan(1, [100, 128, 34])?, GemmPlan::Portable);
        assert!(gemm.plan(1, [100, 128, 0]).is_err());
        Ok(())
    });
}

#[test]
fn rows_of_groups_for_which_there_is_no_room_are_left_out() {
    on_gpus("rows_of_groups_for_which_there_is_no_room_are_left_out", 1, |rank| {
        let stream = rank.stream()?;
        for gemm in by_every_plan(rank, &stream)? {
            // The last group begins after the last row, or in the middle of what there is.
            for sizes in [&[20, 30, 7, 9], &[20, 3, 4, 39]] {
                let case = Case::new(sizes, 1, [72, 40]);
                Matrices::<bf16>::new(rank, case, 25)?.multiply(&gemm, &stream, 1)?;
            }
        }
        Ok(())
    });
}

#[test]
fn an_activation_is_applied_to_the_sums_of_groups() {
    on_gpus("an_activation_is_applied_to_the_sums_of_groups", 1, |rank| {
        let stream = rank.stream()?;
        let matrices = Matrices::<bf16>::new(rank, Case::new(&[20, 0, 150], 1, [72, 72]), 0)?;
        for gemm in by_every_plan(rank, &stream)? {
            matrices.launch(&gemm, Some(Activation::Silu))?;
            stream.synchronize()?;
            matrices.check(1, |sum, got| {
                let right = sum / (1.0 + (-sum).exp());
                // The bound is half a step of bf16, and the sigmoid's error.
                (got.value() - right).abs() <= (bf16::EPSILON.to_f64() / 2.0 + 1e-5) * right.abs()
            })?;
        }
        Ok(())
    });
}

#[test]
fn a_graph_is_replayed_with_other_groups() {
    on_gpus("a_graph_is_replayed_with_other_groups", 1, |rank| {
        let stream = rank.stream()?;
        let case = Case::new(&[60, 10, 30], 1, [72, 40]);
        let mut matrices = Matrices::<bf16>::new(rank, case, 0)?;
        for gemm in by_every_plan(rank, &stream)? {
            let graph = stream.capture(|| matrices.launch(&gemm, None))?;
            for sizes in [[60, 10, 30], [0, 100, 0], [0, 0, 0], [33, 33, 34]] {
                matrices.case.sizes = sizes.to_vec();
                matrices.write_groups()?;
                graph.launch(&stream)?;
                stream.synchronize()?;
                matrices.check(1, rounded)?;
            }
        }
        Ok(())
    });
}

#[test]
fn bad_grouped_products_are_refused_with_the_reason() {
    on_gpus("bad_grouped_products_are_refused_with_the_reason", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let gemm = GroupedGemm::new(&stream)?;
        let (matrix, c) = (comm.mem_alloc::<bf16>(64 * 64)?, comm.mem_alloc::<bf16>(64 * 64)?);
        let other = GroupedGemm::new(&stream)?.with_plan("swapped:32x64:1".parse().unwrap());
        assert!(other.is_err_and(|e| e.to_string().contains("`swapped:32x64:1` is none")));
        let words = comm.mem_alloc::<u32>(4)?;
        let groups = |offsets: usize, sizes: usize| {
            let (offsets, sizes) = (words.slice(..offsets)?, words.slice(..sizes)?);
            Ok::<_, Error>(RowGroups { offsets, sizes })
        };
        for (offsets, sizes, shape, reason) in [
            (4, 4, [64, 0, 8], "nothing to do"),
            (4, 0, [64, 8, 8], "without groups has nothing to do"),
            (3, 4, [64, 8, 8], "the groups' offsets has 3 elements"),
            (4, 4, [65, 8, 64], "A has 4096 elements"),
            (4, 4, [64, 17, 64], "B has 4096 elements, but needs 68 x 64"),
            (1, 1, [512, 512, 8], "C has 4096 elements"),
            (4, 4, [64, 1 << 30, 8], "the B of 4 groups have 4294967296 rows"),
        ] {
            let groups = groups(offsets, sizes)?;
            let error = gemm.launch(&matrix, &matrix, &c, &groups, shape, None).err();
            let error = error.map(|e| e.to_string());
            assert!(error.as_ref().is_some_and(|e| e.contains(reason)), "{shape:?}: {error:?}");
        }
        Ok(())
    });
}
