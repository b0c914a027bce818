//! The reference of residual addition and RMSNorm.

use crate::numbers::Number;

/// Returns the number of wrong elements of the normalised row `out`, which is divided by `divisor`,
/// and of the new residual. `sums` are the elements of the sum of input and residual, each with the
/// error that it may have before it is rounded to `T`.
///
/// RMSNorm itself may add the errors of f32 roundings of the mean, its root and the products, and
/// that of one rounding to `T` of each result.
pub fn count_wrong<T: Number, O: Number>(
    sums: &[(f64, f64)],
    weight: &[T],
    eps: f32,
    (out, divisor): (&[O], f64),
    residual: &[T],
) -> usize {
    let squares: f64 = sums.iter().map(|(sum, _)| sum * sum).sum();
    let squares_error: f64 =
        sums.iter().map(|(sum, error)| 2.0 * sum.abs() * error + error * error).sum();
    let count = sums.len() as f64;
    let argument = squares + count * f64::from(eps);
    let scale = (count / argument).sqrt();
    // A root has half the relative error of its argument. The sums of squares, the root and the
    // products are rounded to f32; 32 such roundings are a generous bound for all.
    let scale_error = squares_error / argument / 2.0 + 32.0 * f64::from(f32::EPSILON);
    let mut wrong = 0;
    for (i, (sum, error)) in sums.iter().enumerate() {
        let factor = scale * weight[i].value() / divisor;
        let right = sum * factor;
        let out_error = (error * factor).abs() * (1.0 + scale_error) + right.abs() * scale_error;
        wrong += usize::from(differs(out[i], right, out_error));
        wrong += usize::from(differs(residual[i], *sum, *error));
    }
    wrong
}

/// Returns whether `got` differs from `right` by more than `error` and one rounding to `T`.
pub fn differs<T: Number>(got: T, right: f64, error: f64) -> bool {
    let rounding = T::EPSILON / 2.0 * (right.abs() + error);
    let off = (got.value() - right).abs();
    let is_near = off <= error + rounding.max(T::HALF_STEP_AT_ZERO);
    !is_near
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let count = |out: f32| {
            count_wrong(&[(0.0, 0.0); 4], &[1_f32; 4], 1e-6, (&[out; 4], 1.0), &[0_f32; 4])
        };
        assert_eq!((count(0.0), count(5.0)), (0, 4));
    }

    #[test]
    fn a_wrong_element_of_either_result_is_counted() {
        let sums = [(3.0, 0.0), (4.0, 0.0)];
        let weight = [bf16::ONE; 2];
        let root = 12.5f32.sqrt();
        let mut out = [3.0, 4.0].map(|x: f32| bf16::from_f32(x / root));
        let mut residual = [3.0, 4.0].map(bf16::from_f32);
        let count = |out: &[bf16], residual: &[bf16]| {
            count_wrong(&sums, &weight, 0.0, (out, 1.0), residual)
        };
        assert_eq!(count(&out, &residual), 0);
        out[1] = bf16::from_f32(1.01 * out[1].to_f32());
        residual[0] = bf16::NAN;
        assert_eq!(count(&out, &residual), 2);
    }
}
