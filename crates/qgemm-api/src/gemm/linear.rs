//! Linear layer over host slices: one call, at the cost of copies and a plan.

use qgemm_formats::DType;
use qgemm_hal::XPrecision;

use crate::context::Context;
use crate::error::Error;
use crate::gemm::{Args, Problem};
use crate::weight::Weight;

impl Context {
    /// Computes `X·Wᵀ` for `m` rows of `x`, both f32 on the host. Returns `m × n` values.
    ///
    /// `x_precision` bounds the rounding of X: [`XPrecision::Auto`] for speed,
    /// [`XPrecision::Exact`] for full precision.
    ///
    /// # Errors
    /// When `x` is not `m × k` values long. Others as in [`Context::plan`] and
    /// [`Plan::run`](crate::Plan::run).
    pub fn linear(&self, weight: &Weight, x: &[f32], m: usize, x_precision: XPrecision) -> Result<Vec<f32>, Error> {
        self.linear_with(weight, x, m, DType::F32, x_precision, None)
    }

    /// [`Context::linear`] with X in `x_dtype` and an optional bias of N values.
    /// D is computed and returned in f32.
    ///
    /// # Errors
    /// As [`Context::linear`], and when the bias is not N values long.
    pub fn linear_with(
        &self,
        weight: &Weight,
        x: &[f32],
        m: usize,
        x_dtype: DType,
        x_precision: XPrecision,
        bias: Option<&[f32]>,
    ) -> Result<Vec<f32>, Error> {
        let (n, k) = (weight.n(), weight.k());
        check_length("X", product("X", m, k)?, x.len())?;
        let outputs = product("D", m, n)?;
        let mut problem = Problem::new(weight, m).x_dtype(x_dtype).x_precision(x_precision).d_dtype(DType::F32);
        if let Some(bias) = bias {
            check_length("bias", n, bias.len())?;
            problem = problem.bias(DType::F32);
        }
        let plan = self.plan(&problem)?;
        if m == 0 {
            return Ok(Vec::new());
        }
        let x = self.upload(&x_dtype.encode(x))?;
        let bias = bias.map(|b| self.upload(&DType::F32.encode(b))).transpose()?;
        let mut d = self.allocate(outputs * DType::F32.bytes())?;
        let mut workspace = match plan.workspace_bytes() {
            0 => None,
            bytes => Some(self.workspace(bytes)?),
        };
        let mut args = Args::new(&x, weight, &mut d);
        args.bias = bias.as_ref().map(Into::into);
        args.workspace = workspace.as_mut();
        plan.run(&self.default_stream(), args)?;
        Ok(DType::F32.decode(&self.download(&d)?))
    }
}

fn product(operand: &'static str, rows: usize, columns: usize) -> Result<usize, Error> {
    rows.checked_mul(columns).ok_or(Error::ExtentOverflow { operand, rows: rows as u64, row_stride: columns as u64 })
}

fn check_length(operand: &'static str, expected: usize, got: usize) -> Result<(), Error> {
    if got == expected { Ok(()) } else { Err(Error::WrongLength { operand, expected, got }) }
}
