//! NCCL's twelve element types at run time, and values that all of them hold exactly.
//!
//! The values are small integers. Their sums, products and averages over four ranks, and all
//! partial results, are exact even with the two mantissa bits of `Float8e5m2`, so results are
//! compared bit for bit, in any order of summation.

use devcomm::{DataType, ReduceOp};
use half::{bf16, f16};

/// Bytes of the largest element.
pub const LARGEST: usize = 8;

/// An element type, with its encoding of small integers.
pub struct ElementType {
    pub data_type: DataType,
    /// Encodings of the integers from `-LIMIT` on; `None` for one that the type does not hold.
    encodings: Vec<Option<[u8; LARGEST]>>,
}

const LIMIT: i32 = 64;

/// Returns all element types of NCCL.
pub fn types() -> Vec<ElementType> {
    use DataType::*;
    [
        Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16, Float8e4m3,
        Float8e5m2,
    ]
    .map(|data_type| ElementType {
        data_type,
        encodings: (-LIMIT..=LIMIT).map(|value| encode(data_type, value)).collect(),
    })
    .into()
}

impl ElementType {
    /// Returns the size of an element in bytes.
    pub fn size(&self) -> usize {
        self.data_type.size()
    }

    /// Returns the bytes of elements with these values.
    pub fn encode(&self, values: &[i32]) -> Vec<u8> {
        let size = self.size();
        let mut bytes = Vec::with_capacity(values.len() * size);
        for value in values {
            let encoding = self.encodings.get((value + LIMIT) as usize).copied().flatten();
            let encoding =
                encoding.unwrap_or_else(|| panic!("{:?} does not hold {value}", self.data_type));
            bytes.extend_from_slice(&encoding[..size]);
        }
        bytes
    }
}

fn encode(data_type: DataType, value: i32) -> Option<[u8; LARGEST]> {
    let float = value as f32;
    Some(match data_type {
        DataType::Int8 => padded(i8::try_from(value).ok()?.to_le_bytes()),
        DataType::Uint8 => padded(u8::try_from(value).ok()?.to_le_bytes()),
        DataType::Int32 => padded(value.to_le_bytes()),
        DataType::Uint32 => padded(u32::try_from(value).ok()?.to_le_bytes()),
        DataType::Int64 => i64::from(value).to_le_bytes(),
        DataType::Uint64 => u64::try_from(value).ok()?.to_le_bytes(),
        DataType::Float16 => padded(f16::from_f32(float).to_le_bytes()),
        DataType::Float32 => padded(float.to_le_bytes()),
        DataType::Float64 => f64::from(value).to_le_bytes(),
        DataType::Bfloat16 => padded(bf16::from_f32(float).to_le_bytes()),
        DataType::Float8e4m3 => padded([small_float(value, 3, 7)?]),
        DataType::Float8e5m2 => padded([small_float(value, 2, 15)?]),
    })
}

fn padded<const N: usize>(bytes: [u8; N]) -> [u8; LARGEST] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}

/// Returns an 8-bit float with this many mantissa bits, if it holds the integer exactly.
fn small_float(value: i32, mantissa_bits: u32, bias: u32) -> Option<u8> {
    let magnitude = value.unsigned_abs();
    let sign = u8::from(value < 0) << 7;
    let Some(exponent) = magnitude.checked_ilog2() else { return Some(0) };
    let scaled = magnitude << mantissa_bits;
    if !scaled.is_multiple_of(1 << exponent) {
        return None;
    }
    let mantissa = (scaled >> exponent) & ((1 << mantissa_bits) - 1);
    Some(sign | ((exponent + bias) << mantissa_bits | mantissa) as u8)
}

/// The set of values that the ranks contribute.
#[derive(Clone, Copy)]
pub enum Domain {
    /// -2 to 2 if signed, else 0 to 2.
    Small { signed: bool },
    /// 1 and 2, and also -1 and -2 if signed.
    Factors { signed: bool },
    /// Small values times the number of ranks, so that averages are integers.
    Divisible { signed: bool },
}

impl Domain {
    /// Returns the domain in which `op` is exact for a type.
    pub fn of(op: ReduceOp, data_type: DataType) -> Self {
        let signed = !matches!(data_type, DataType::Uint8 | DataType::Uint32 | DataType::Uint64);
        match op {
            ReduceOp::Prod => Self::Factors { signed },
            ReduceOp::Avg => Self::Divisible { signed },
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::Min => Self::Small { signed },
        }
    }

    /// Returns a random value for element `index` of rank `rank`.
    pub fn value(self, n_ranks: usize, rank: usize, index: usize) -> i32 {
        let mut rng = fastrand::Rng::with_seed((rank as u64) << 48 | index as u64);
        let mut small = |signed| if signed { rng.i32(-2..=2) } else { rng.i32(0..=2) };
        match self {
            Self::Small { signed } => small(signed),
            Self::Divisible { signed } => small(signed) * n_ranks as i32,
            Self::Factors { signed: false } => [1, 2][rng.usize(..2)],
            Self::Factors { signed: true } => [1, 2, -1, -2][rng.usize(..4)],
        }
    }
}

/// Returns the result of `op` on the ranks' values of one element.
pub fn combine(op: ReduceOp, values: &[i32]) -> i32 {
    let sum = || values.iter().sum::<i32>();
    match op {
        ReduceOp::Sum => sum(),
        ReduceOp::Avg => sum() / values.len() as i32,
        ReduceOp::Prod => values.iter().product(),
        ReduceOp::Max => values.iter().copied().max().unwrap_or_default(),
        ReduceOp::Min => values.iter().copied().min().unwrap_or_default(),
    }
}

#[test]
fn the_8_bit_floats_are_encoded_as_their_formats_say() {
    let float = |sign: u8, exponent: u8, mantissa_bits: u32, mantissa: u8| {
        Some(sign << 7 | exponent << mantissa_bits | mantissa)
    };
    assert_eq!(small_float(1, 3, 7), float(0, 7, 3, 0b000));
    assert_eq!(small_float(-3, 3, 7), float(1, 8, 3, 0b100));
    assert_eq!(small_float(10, 2, 15), float(0, 18, 2, 0b01));
    assert_eq!(small_float(0, 2, 15), Some(0));
    assert_eq!(small_float(9, 2, 15), None);
}

#[test]
fn every_type_holds_every_value_and_every_partial_result() {
    for element in types() {
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg] {
            let domain = Domain::of(op, element.data_type);
            for (n, index) in [2, 4].into_iter().flat_map(|n| (0..1000).map(move |i| (n, i))) {
                let values: Vec<i32> = (0..n).map(|rank| domain.value(n, rank, index)).collect();
                let partial = if matches!(op, ReduceOp::Avg) { ReduceOp::Sum } else { op };
                let results = (1..=n).map(|ranks| combine(partial, &values[..ranks]));
                // Panics on a value that the type does not hold.
                let encoded = element.encode(&results.collect::<Vec<_>>());
                assert_eq!(encoded.len(), n * element.size());
                if matches!(op, ReduceOp::Avg) {
                    assert_eq!(combine(op, &values) * n as i32, values.iter().sum::<i32>());
                }
            }
        }
    }
}
